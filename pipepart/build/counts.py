"""How many micro-batches: the usual number, or another one that is clearly faster by what was measured.

More micro-batches leave a smaller bubble, larger ones use a device better; where the best lies depends on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from pipepart.cost import OpCosts, whole_step
from pipepart.errors import PartitionError, PlanError
from pipepart.planning import Plan
from pipepart.planning.sources import resized, scaled
from pipepart.recording import Recording

__all__ = ["Cut", "best_cut", "measured_cuts"]

_PER_STAGE = (2, 8)
"""Micro-batches per stage that are tried besides the usual number."""

_CLEARLY = 0.96
"""What a step must take of the usual one to be preferred: what is measured is never the same twice."""


@dataclass(frozen=True)
class Cut:
    """One way to cut the batch."""

    microbatches: int
    size: int
    """Samples of the largest micro-batch."""
    costs: OpCosts


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
    for each in _PER_STAGE:
        size = -(-batch_size // min(batch_size, each * stages))
        count = -(-batch_size // size)
        if any(cut.size == size for cut in found):
            continue
        cut = None
        part = resized(leaves, size, recording.batching)
        if recording.stale(part) is None:  # models may do something else for a single sample
            cut = _measured(usual, recording, part, count, size, context)
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
    count: int,
    size: int,
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
    costs = scaled(usual.costs, size / usual.size, forward / then[0], backward / then[1])
    return Cut(count, size, costs)


def best_cut(cuts: Sequence[Cut], plan: Callable[[Cut], Plan]) -> tuple[Plan, Cut]:
    """The plan of the usual cut, or of one whose step is clearly shorter, or that fits into memory where it does not."""
    found: list[tuple[Plan, Cut]] = []
    refused: PartitionError | PlanError | None = None
    for cut in cuts:
        try:
            found.append((plan(cut), cut))
        except (PartitionError, PlanError) as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    usual, fastest = found[0], min(found, key=lambda pair: pair[0].step_time)
    return fastest if fastest[0].step_time < _CLEARLY * usual[0].step_time else usual
