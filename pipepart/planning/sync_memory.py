"""The parameters that a stage holds at once if replicas borrow them from each other (`sync="fsdp"`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipepart.planning.plan import Plan
from pipepart.planning.sync_mode import SyncMode

__all__ = ["bytes_at_work", "gather_of"]

_AT_ONCE = 2
"""Chunks of a stage that are whole at once: the one at work, and the next one, which is on its way."""


def bytes_at_work(own: float, chunks: Sequence[float], share: float) -> float:
    """Return the bytes of parameters of a stage: a `share` of all of its `own` ones, and the rest of the largest chunks."""
    return min(own, share * own + (1.0 - share) * sum(sorted(chunks)[-_AT_ONCE:]))


def gather_of(mode: SyncMode, plan: Plan) -> SyncMode:
    """Return the mode with the choice of ``gather="auto"``, which depends on the plan alone.

    Parameters that come once per step travel least. They come for each run of a chunk if the stage would be too full, as
    the plan predicts.
    """
    if mode.mode != "fsdp" or mode.gather != "auto":
        return mode
    fits = True
    if plan.memory_limit is not None:
        for stage, memory in enumerate(plan.memory):
            own = sum(chunk.parameter_bytes for chunk in plan.chunks if chunk.stage == stage)
            fits = fits and memory.total - memory.weights + max(own, memory.weights) <= plan.memory_limit
    return replace(mode, gather="step" if fits else "microbatch")
