"""What the page is told: plans, timelines and the graph as one JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pipepart.errors import PlanError
from pipepart.planning.plan import Plan
from pipepart.report.graph_view import GraphView
from pipepart.report.trace_file import pack
from pipepart.schedule import SCHEDULES, Timeline

__all__ = ["MemoryModel", "make_payload", "stage_memory"]

EXACT_EVENTS = 20_000
"""Timelines of more events are written with ten significant digits: enough for any zoom, half the size."""


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """What the caller knows better than the plan about memory; what is None is taken from the plan."""

    optimizer_states: float | None = None
    """Bytes that the optimizer keeps per byte of weights: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD."""
    limit: float | Sequence[float] | None = None
    """Bytes of a device, or one number for each stage."""

    def limits(self, plan: Plan) -> list[float | None]:
        if self.limit is None or isinstance(self.limit, (int, float)):
            return [plan.memory_limit if self.limit is None else self.limit] * plan.stages
        if len(self.limit) != plan.stages:
            raise PlanError(
                f"memory limit: expected one number or {plan.stages}, one for each stage, got {len(self.limit)}"
            )
        return list(self.limit)


USUAL_STATES = 2.0
"""Of Adam: for plans that say nothing about memory."""


def stage_memory(plan: Plan, memory: MemoryModel | None = None) -> list[dict[str, float | None]]:
    """Per stage: bytes of weights, gradients, optimizer state, activations at their peak, scratch, and the limit."""
    memory = memory or MemoryModel()
    found: list[dict[str, float | None]] = []
    for stage, limit in enumerate(memory.limits(plan)):
        if plan.memory:
            held = plan.memory[stage]
            row: dict[str, float | None] = dataclasses.asdict(held)
        else:
            weights = float(sum(chunk.parameter_bytes for chunk in plan.chunks if chunk.stage == stage))
            live = plan.timeline.peak_activations[stage]
            row = {"weights": weights, "gradients": weights, "optimizer": weights * USUAL_STATES, "activations": live}
            row["scratch"] = 0.0
        if memory.optimizer_states is not None:
            row["optimizer"] = float(row["weights"] or 0.0) * memory.optimizer_states
        found.append({**row, "limit": limit})
    return found


def make_payload(
    plan: Plan,
    *,
    title: str,
    graph: GraphView | None = None,
    measured: Timeline | None = None,
    measured_step: float | None = None,
    compare: Plan | None = None,
    memory: MemoryModel | None = None,
) -> dict[str, Any]:
    """The whole document. `graph` may be missing: then the ops are known by name only."""
    if graph is not None and graph.name != plan.ops:
        raise PlanError(
            f"the graph is not the plan's: {len(graph)} ops against {len(plan.ops)}, or other names. "
            "Give the graph that was planned, or leave it out."
        )
    if measured is not None and measured.stages != plan.stages:
        raise PlanError(
            f"the measured timeline has {measured.stages} stages, the plan {plan.stages}; give its own trace"
        )
    if measured_step is None and measured is not None:
        measured_step = measured.step_time
    if measured is not None and (measured.edges is None or not measured.activation):
        measured = Timeline(
            measured.stages, measured.events, plan.edges, plan.costs.activation, measured.kept_for_weight
        )
    view = graph or GraphView.from_names(plan.ops, plan.graph_hash)
    return {
        "version": 1,
        "title": title,
        "plan": _plan(plan, memory),
        "compare": None if compare is None else _plan(compare, memory),
        "same_ops": compare is not None and compare.ops == plan.ops,
        "measured": None if measured is None else _packed(measured),
        "measured_step": measured_step,
        "graph": _graph(view, known=graph is not None),
        "schedules": {name: kind.summary for name, kind in SCHEDULES.items()},
        "optimizer_states": _states(plan, memory),
    }


def _states(plan: Plan, memory: MemoryModel | None) -> float | None:
    """How many times the weights the optimizer was counted as; None: as the plan counts it."""
    if memory is not None and memory.optimizer_states is not None:
        return memory.optimizer_states
    return None if plan.memory else USUAL_STATES


def _packed(timeline: Timeline) -> dict[str, Any]:
    return pack(timeline, 10 if len(timeline.events) > EXACT_EVENTS else None)


def _plan(plan: Plan, memory: MemoryModel | None) -> dict[str, Any]:
    costs = plan.costs
    samples = plan.batch_size * plan.replicas
    return {
        "hash": plan.hash,
        "graph_hash": plan.graph_hash,
        "stages": plan.stages,
        "chunks_per_stage": plan.chunks_per_stage,
        "replicas": plan.replicas,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule,
        "slack": plan.slack,
        "placement": plan.placement,
        "chunk_of": plan.chunk_of,
        "chunks": [dataclasses.asdict(chunk) for chunk in plan.chunks],
        "traffic": [dataclasses.asdict(item) for item in plan.traffic],
        "step_time": plan.step_time,
        "rehearsed": plan.rehearsed,
        "predicted": plan.predicted,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "bottleneck_gap": plan.bottleneck_gap,
        "proved": plan.proved,
        "bubble": plan.bubble,
        "throughput": samples / plan.predicted if plan.predicted else None,
        "cost_source": plan.cost_source,
        "method": plan.method,
        "baselines": plan.baselines,
        "tried": plan.tried,
        "recompute": plan.recomputes,
        "cluster": plan.cluster,
        "costs": {
            "forward": costs.forward,
            "backward_input": costs.backward_input,
            "backward_weight": costs.backward_weight,
            "backward": costs.backward,
            "recompute": costs.recompute,
            "activation": costs.activation,
            "kept_for_weight": costs.kept_for_weight,
            "send_forward": [[*pair, seconds] for pair, seconds in sorted(costs.send_forward.items())],
            "send_backward": [[*pair, seconds] for pair, seconds in sorted(costs.send_backward.items())],
            "contention": costs.contention,
            "reduce": costs.reduce,
            "reduce_tied": costs.reduce_tied,
            "handling_forward": costs.handling_forward,
            "handling_backward": costs.handling_backward,
        },
        "edges": {
            "forward": sorted(plan.edges.forward),
            "backward": sorted(plan.edges.backward),
            "tied": plan.edges.tied,
        },
        "timeline": _packed(plan.timeline),
        "memory": stage_memory(plan, memory),
    }


def _graph(view: GraphView, known: bool) -> dict[str, Any]:
    """Columns of the ops; words that come again and again (modules, shapes) by their number in a table."""
    words: dict[str, int] = {}

    def coded(values: Sequence[str]) -> list[int]:
        return [words.setdefault(value, len(words)) for value in values]

    columns: dict[str, Any] = {"name": view.name}
    for field in ("kind", "target", "module", "module_class", "source", "shape", "dtype"):
        columns[field] = coded(getattr(view, field))
    for field in ("output_bytes", "flops", "saved_bytes", "parameter_bytes"):
        columns[field] = getattr(view, field)
    for field in ("forward", "backward_input", "backward_weight"):
        columns[field] = [float(f"{seconds:.5g}") for seconds in getattr(view, field)]
    parameters = [coded(names) for names in view.parameters]
    return {
        "known": known,
        "hash": view.hash,
        "columns": columns,
        "words": list(words),
        "parameters": parameters,
        "edges": [op for edge in view.edges for op in edge],
        "tied": view.tied,
    }
