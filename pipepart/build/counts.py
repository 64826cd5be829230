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
from pipepart.planning import BatchCut, neighbouring_cuts
from pipepart.planning.sources import resized, scaled
from pipepart.recording import Recording

__all__ = ["Cut", "MeasuredCuts", "measured_cuts"]


@dataclass(frozen=True)
class Cut:
    """One way to cut the batch, with the costs of one micro-batch."""

    microbatches: int
    size: int
    """Samples of the largest micro-batch."""
    costs: OpCosts


@dataclass(frozen=True)
class MeasuredCuts:
    """The cuts that were measured, the usual one first: candidates of the search for a plan, and its source of costs."""

    cuts: tuple[Cut, ...]

    @property
    def candidates(self) -> tuple[BatchCut, ...]:
        return tuple(BatchCut(cut.microbatches, cut.size) for cut in self.cuts)

    def at(self, microbatch_size: int, kind: str) -> OpCosts:
        return next(cut.costs for cut in self.cuts if cut.size == microbatch_size)


def measured_cuts(
    usual: Cut,
    recording: Recording,
    leaves: Sequence[Any],
    batch_size: int,
    stages: int,
    context: Callable[[], AbstractContextManager[Any]],
    agree: Callable[[bool], bool],
) -> list[Cut]:
    """The usual cut first, then others with their costs. All ranks measure at the same time."""
    found = [usual]
    if stages == 1 or _changes_results(recording):
        return found
    for other in neighbouring_cuts(stages, batch_size, usual.size):
        cut = None
        part = resized(leaves, other.size, recording.batching)
        if recording.stale(part) is None:  # models may do something else for a single sample
            cut = _measured(usual, recording, part, other, context)
        if agree(cut is not None) and cut is not None:
            found.append(cut)
    return found


def _changes_results(recording: Recording) -> bool:
    """Whether the model learns something else from micro-batches of another size: then no stopwatch may choose it."""
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in recording.root.modules())


def _measured(
    usual: Cut,
    recording: Recording,
    leaves: Sequence[Any],
    other: BatchCut,
    context: Callable[[], AbstractContextManager[Any]],
) -> Cut | None:
    """The shares of the ops stay as they are; the times of all together are measured."""
    try:
        forward, backward = whole_step(recording, leaves, context)
    except torch.OutOfMemoryError:
        return None
    then = sum(usual.costs.forward), sum(usual.costs.backward)
    if not all((forward, backward, *then)):
        return None
    costs = scaled(usual.costs, other.size / usual.size, forward / then[0], backward / then[1])
    return Cut(other.microbatches, other.size, costs)
