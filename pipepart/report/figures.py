"""Figures of plans and measured steps under stable names, for trackers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipepart.planning.plan import Plan
from pipepart.schedule import Timeline

__all__ = ["PREFIX", "WARM_UP", "measured_step", "plan_figures", "step_figures", "warm_steps"]

PREFIX = "pipepart/"
WARM_UP = 3
"""First steps of a run, which announce shapes and fill caches."""


def warm_steps(step_times: Sequence[float]) -> Sequence[float]:
    """Return the usual steps of a run: all but the first few, or all if there are no others."""
    return step_times[WARM_UP:] or step_times


def measured_step(step_times: Sequence[float]) -> float | None:
    """Return the seconds of a usual step of a run, for all output; None if the run had no step."""
    return statistics.median(warm_steps(step_times)) if step_times else None


def plan_figures(plan: Plan) -> dict[str, float | int | str | list[int]]:
    """Return the figures of a plan for the configuration of a run."""
    return {
        "hash": plan.hash,
        "graph_hash": plan.graph_hash,
        "stages": plan.stages,
        "replicas": plan.replicas,
        "chunks_per_stage": plan.chunks_per_stage,
        "placement": list(plan.placement),
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule,
        "slack": plan.slack,
        "predicted_step_seconds": plan.predicted,
        "simulated_step_seconds": plan.step_time,
        "predicted_bubble": plan.bubble,
        "lower_bound_seconds": plan.lower_bound,
        "gap": plan.gap,
        "bottleneck_gap": plan.bottleneck_gap,
        "cost_source": plan.cost_source,
        "method": plan.method,
    }


def step_figures(
    plan: Plan,
    step_times: Sequence[float],
    *,
    samples: int | None = None,
    timeline: Timeline | None = None,
    memory: Sequence[float] | None = None,
    gradient_norm: float | None = None,
) -> dict[str, float]:
    """Return the figures of one interval of training.

    `step_times` are seconds, `samples` those of the interval, `timeline` a traced step, `memory` bytes per stage. Unknown
    figures are left out; the predictions are always there for comparison.
    """
    found: dict[str, float] = {
        "predicted_step_seconds": plan.predicted,
        "predicted_bubble": plan.bubble,
    }
    if step_times:
        step = statistics.median(step_times)
        found["step_seconds"] = step
        seen, seconds = (samples, sum(step_times)) if samples is not None else (plan.batch_size * plan.replicas, step)
        found["samples_per_second"] = seen / seconds if seconds else 0.0
        found["prediction_error"] = plan.predicted / step - 1 if step else 0.0
    if timeline is not None:
        found["traced_step_seconds"] = timeline.step_time
        found["bubble"] = timeline.bubble
        for stage, events in enumerate(timeline.compute):
            forward = sum(event.duration for event in events if event.action.kind == "F")
            found[f"stage_{stage}/forward_seconds"] = forward
            found[f"stage_{stage}/backward_seconds"] = timeline.busy[stage] - forward
            found[f"stage_{stage}/idle_seconds"] = timeline.idle[stage]
            found[f"stage_{stage}/predicted_busy_seconds"] = plan.timeline.busy[stage]
    for stage, size in enumerate(memory or ()):
        found[f"stage_{stage}/memory_bytes"] = size
    if gradient_norm is not None:
        found["gradient_norm"] = gradient_norm
    return {PREFIX + name: float(value) for name, value in found.items()}
