"""The step of replicas without a pipeline, on the devices and with the batch of a measured pipeline: an estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pipepart.partition import Link
from pipepart.planning.layout import GROUP_LINK, ring_seconds
from pipepart.planning.plan import Plan
from pipepart.values import Range

__all__ = ["Alternative", "replicas_only"]

_BUCKET = 25 * 2**20
"""Bytes of gradients that are summed at once; the last bucket cannot be hidden by the backward."""


@dataclass(frozen=True)
class Alternative:
    """A way to train without a pipeline, with its estimated step."""

    name: str
    seconds: Annotated[float, Range(0, 1e9)]
    exchange: Annotated[float, Range(0, 1e9)]
    """The seconds of the step in which replicas exchange values and nothing hides it."""
    assumed: bool
    """Whether the links of the job were not measured, so that the exchange takes as long as the planner assumes."""
    memory: Annotated[float, Range(0, 1e18)] | None
    """Bytes on each device; None: not known."""
    fits: bool | None
    """Whether this is within the memory limit; None: not known."""


def replicas_only(
    plan: Plan, *, compute: float, backward: float, optimizer: float, around: float
) -> tuple[Alternative, ...]:
    """Return plain replicas, as with DDP, and replicas that share the optimizer states among each other.

    ``compute``, ``backward`` (a part of it) and ``optimizer`` are mean seconds of a device in the pipeline. Without a
    pipeline a device computes an equal part of the batch through the whole model, and updates all parameters. ``around``:
    seconds of a step for input and the trainer.
    """
    devices = plan.stages * plan.replicas
    if plan.stages == 1:
        return ()
    size = float(sum(chunk.parameter_bytes for chunk in plan.chunks))
    ring = ring_seconds(_slowest_link(plan), devices, size)
    seen = sum(chunk.parameter_bytes for chunk in plan.chunks if chunk.stage == 0)
    update = optimizer * (size / seen if seen else plan.stages)
    found = []
    for name, shares in (("plain replicas (DDP)", False), ("replicas with sharded states (ZeRO-1)", True)):
        summed = ring / 2 if shares else ring  # then sums travel one half, and new parameters the other
        exposed = max(summed - backward, summed * min(1.0, _BUCKET / size) if size else 0.0) + ring - summed
        seconds = compute + exposed + update / (devices if shares else 1) + around
        memory = _memory(plan, devices if shares else 1)
        limit = plan.memory_limit
        fits = None if memory is None or limit is None else memory <= limit
        found.append(Alternative(name, seconds, exposed, not plan.links, memory, fits))
    return tuple(found)


def _slowest_link(plan: Plan) -> Link:
    """Return the slowest link of the job that was measured, or the one that the planner assumes."""
    bandwidth = min((bandwidth for _, bandwidth, _ in plan.links), default=GROUP_LINK.bandwidth)
    return Link(bandwidth, max((seconds for _, _, seconds in plan.links), default=GROUP_LINK.latency))


def _memory(plan: Plan, shares: int) -> float | None:
    """Return the bytes of a device that holds the whole model, and a ``shares``-th part of the optimizer states."""
    if not plan.memory:
        return None
    states = sum(held.weights + held.gradients + held.optimizer / shares for held in plan.memory)
    each = sum(chunk.held_bytes(again) for chunk, again in zip(plan.chunks, plan.recomputes))
    scratch = max(held.scratch for held in plan.memory)
    return float(states + each * plan.microbatches / plan.stages + scratch)
