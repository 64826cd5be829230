"""One sentence about a measured step: whether a pipeline is worth it here, and what would help most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipepart.planning.describe import format_bytes, format_seconds
from pipepart.planning.plan import Plan
from pipepart.report.replicas_only import Alternative

__all__ = ["advice"]

_HELP = {
    "bubble": "more micro-batches, or a schedule with a smaller bubble (`schedule=zb_v`)",
    "imbalance": "another split: more chunks per stage, or fewer modules in `keep_together`",
    "communication": "larger micro-batches, cuts that send less, or faster links between the stages",
    "overhead": "fewer and larger micro-batches, since each call has a price",
    "optimizer": "a fused optimizer, or `sync=sharded` with replicas",
    "input": "more workers in the data loader",
    "trainer": "fewer callbacks and logged values in each step",
}
"""What shortens a part of a step."""
_SLIGHT = 0.02
"""A share of the step below which a part is not worth a change."""
_ROUGH = 0.1
"""A difference from an estimated step that says nothing."""


def advice(plan: Plan, step: float, parts: Mapping[str, float], others: Sequence[Alternative]) -> str:
    """Return the sentence. `parts` are seconds by name, `others` the ways to train without a pipeline."""
    most = max(_HELP, key=lambda name: parts[name])
    share = parts[most] / step if step else 0.0
    if share < _SLIGHT:
        help_ = "nearly all of the step is compute, so only faster devices or compiled stages would help"
    else:
        help_ = f"the largest loss is {most} ({share:.0%}); {_HELP[most]} would help most"
    worth = _worth(plan, step, others)
    return f"{worth}; {help_}." if worth else f"{help_[0].upper()}{help_[1:]}."


def _worth(plan: Plan, step: float, others: Sequence[Alternative]) -> str:
    """Return whether a pipeline is worth it; empty if there is no pipeline to compare."""
    if not others:
        return ""
    fitting = [other for other in others if other.fits is not False]
    if not fitting:
        least = min(other.memory or 0.0 for other in others)
        return (
            f"A pipeline is needed here: the whole model takes at least {format_bytes(least)} on a device of "
            f"{format_bytes(plan.memory_limit or 0.0)}"
        )
    best = min(fitting, key=lambda other: other.seconds)
    assumed = " with links as the planner assumes them" if best.assumed else ""
    compared = (
        f"{best.name} would take about {format_seconds(best.seconds)}{assumed}, the pipeline {format_seconds(step)}"
    )
    if best.seconds < step * (1 - _ROUGH):
        return f"A pipeline is not worth it here for speed: {compared}"
    if best.seconds > step * (1 + _ROUGH):
        return f"A pipeline is worth it here: {compared}"
    return f"A pipeline is about as fast as replicas here: {compared}"
