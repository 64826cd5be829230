"""The numbers of micro-batches that are measured before a run: the usual one, and the next ones where it is free.

More micro-batches leave a smaller bubble, larger ones use a device better; where the best lies depends on the model. The
search for a plan chooses among them (`planning/search.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from pipepart.cost import OpCosts, whole_step
from pipepart.planning import MicrobatchCount, neighbouring_counts
from pipepart.planning.sources import resized
from pipepart.recording import Recording

__all__ = ["MeasuredCount", "MeasuredCounts", "measured_counts"]


@dataclass(frozen=True)
class MeasuredCount:
    """A number of micro-batches, with the costs of one of them."""

    microbatches: int
    size: int
    """Samples of the largest micro-batch."""
    costs: OpCosts


@dataclass(frozen=True)
class MeasuredCounts:
    """The numbers that were measured, the usual one first: candidates of the search for a plan, and its source of costs."""

    counts: tuple[MeasuredCount, ...]

    @property
    def candidates(self) -> tuple[MicrobatchCount, ...]:
        return tuple(MicrobatchCount(count.microbatches, count.size) for count in self.counts)

    def at(self, microbatch_size: int, kind: str) -> OpCosts:
        return next(count.costs for count in self.counts if count.size == microbatch_size)


def measured_counts(
    usual: MeasuredCount,
    recording: Recording,
    leaves: Sequence[Any],
    batch_size: int,
    stages: int,
    context: Callable[[], AbstractContextManager[Any]],
    agree: Callable[[bool], bool],
) -> list[MeasuredCount]:
    """The usual number first, then others with their costs. All ranks measure at the same time."""
    found = [usual]
    if stages == 1 or _changes_results(recording):
        return found
    for other in neighbouring_counts(stages, batch_size, usual.size):
        count = None
        part = resized(leaves, other.size, recording.batching)
        if recording.stale(part) is None:  # models may do something else for a single sample
            count = _measured(usual, recording, part, other, context)
        if agree(count is not None) and count is not None:
            found.append(count)
    return found


def _changes_results(recording: Recording) -> bool:
    """Whether the model learns something else from micro-batches of another size: then no stopwatch may choose it."""
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in recording.root.modules())


def _measured(
    usual: MeasuredCount,
    recording: Recording,
    leaves: Sequence[Any],
    other: MicrobatchCount,
    context: Callable[[], AbstractContextManager[Any]],
) -> MeasuredCount | None:
    """The shares of the ops stay as they are; the times of all together are measured."""
    try:
        forward, backward = whole_step(recording, leaves, context)
    except torch.OutOfMemoryError:
        return None
    then = sum(usual.costs.forward), sum(usual.costs.backward)
    if not all((forward, backward, *then)):
        return None
    costs = usual.costs.scaled(other.size / usual.size, forward / then[0], backward / then[1])
    return MeasuredCount(other.microbatches, other.size, costs)
