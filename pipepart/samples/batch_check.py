"""The batch check: does training on micro-batches give what one process gives on the whole batch?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch

from pipepart.errors import PlanError
from pipepart.recording import Recording
from pipepart.recording.inputs.batching import batching_of
from pipepart.recording.model_state.state import is_abstract
from pipepart.recording.recording import GuardError
from pipepart.samples.mixing import Mixing, Parts, study
from pipepart.samples.pieces import Pieces
from pipepart.samples.weigh import Weighed

__all__ = ["MOST_SAMPLES", "BatchCheck", "ContainerCut", "check_batch", "leaves_that_disagree", "sample_window"]

MOST_SAMPLES = 8
"""Of one micro-batch that is looked at: enough to see samples meet, few enough to cost little."""


_AGAIN = 6
"""How often more is looked at, each time with other parameters and samples, where a count may be right by chance."""


@dataclass(frozen=True)
class BatchCheck:
    """What the check found. Without `mixing`, it could not be made, and `reason` says why."""

    mixing: Mixing | None
    reason: str = ""
    samples: int = 0

    @property
    def same(self) -> bool:
        return self.mixing is None or self.mixing.same


def check_batch(
    recording: Recording,
    leaves: Sequence[Any],
    microbatch_size: int,
    free: frozenset[int] = frozenset(),
    weighed: Weighed | None = None,
    cut: ContainerCut | None = None,
) -> BatchCheck:
    """Hold the loss, the outputs and the gradients of a batch against those of two of its parts.

    `leaves` are those of a whole batch; a window of it around the first cut between two micro-batches is looked at.
    `free` are outputs that are not looked at. With `weighed`, the recording is run with the weights of the batch in it.
    A batch that is cut as a container is looked at by `cut`.
    """
    if is_abstract(recording.root):
        return BatchCheck(None, "the model is on the meta device, so it cannot be run before it is cut")
    try:
        splits = _splits(recording, leaves, microbatch_size) if cut is None else cut.splits(microbatch_size)
        if splits is None:
            return BatchCheck(None)  # nothing is cut
        for split in splits:
            if all(recording.stale(part) is None for part in (split.whole, *split.parts)):
                others = _others(recording, leaves, split.sizes) if cut is None else repeat(split, _AGAIN)
                return _checked(recording, split, free, weighed, others)
    except GuardError as error:
        return BatchCheck(None, str(error).splitlines()[0])
    return BatchCheck(None, "the recording holds for its own batch size only, so the whole batch cannot be run with it")


def _checked(
    recording: Recording, split: Parts, free: frozenset[int], weighed: Weighed | None, others: Iterable[Parts]
) -> BatchCheck:
    def completed(one: Parts) -> Parts:
        return replace(one if weighed is None else _with_numbers(one, weighed), free=free)

    def more() -> Iterator[Parts]:
        for other in others:
            with suppress(Exception):  # the numbers of other samples may be none that the model was recorded with
                yield completed(other)

    samples = sum(split.sizes)
    try:
        found = study(recording if weighed is None else weighed.recording, completed(split), more())
        return BatchCheck(found, samples=samples)
    except Exception as error:
        return BatchCheck(None, f"{type(error).__name__} on {samples} samples: {str(error)[:200]}")


def _splits(recording: Recording, leaves: Sequence[Any], microbatch_size: int) -> list[Parts] | None:
    """Windows of a batch that is cut along a dimension, the best first; None: it is not cut."""
    places = _places(recording, leaves)
    total = int(leaves[places[0]].shape[0]) if places else 0
    if total < 2 or microbatch_size >= total:
        return None
    return [sample_window(leaves, places, microbatch_size, sizes) for sizes in _tries(microbatch_size, total)]


def _others(recording: Recording, leaves: Sequence[Any], sizes: Sequence[int]) -> Iterator[Parts]:
    """Other neighbouring samples of the batch, cut at other places, for what may be right by chance."""
    places = _places(recording, leaves)
    total, most = int(leaves[places[0]].shape[0]), max(sizes)
    near = range(most // 2 + 1, most + 1)
    cuts = [(start, (a, b)) for a in near for b in near for start in range(total - a - b + 1)]
    random.Random(0).shuffle(cuts)
    found = 0
    for start, pair in cuts[: 4 * _AGAIN] or [(0, (sizes[0], sizes[1]))] * _AGAIN:
        window = sample_window(leaves, places, start + pair[0], pair)
        if found < _AGAIN and all(recording.stale(part) is None for part in (window.whole, *window.parts)):
            found += 1
            yield window


@dataclass(frozen=True)
class ContainerCut:
    """A batch that is cut as a container, and the leaves of such a batch as the recording takes them."""

    pieces: Pieces
    batch: Any
    flatten: Callable[[Any], list[Any]]

    def splits(self, microbatch_size: int) -> Iterator[Parts] | None:
        """A part of the batch as a whole of its own, cut by its own rule; None: the batch is not cut."""
        total = self.pieces.samples(self.batch)
        if total < 2 or microbatch_size >= total:
            return None
        few = -(-total // (2 * MOST_SAMPLES - 1))
        whole = self.pieces.cut(self.batch, few)[0].batch if few > 1 else self.batch
        cuts = [self.pieces.cut(whole, count) for count in (2, 3, 4)]
        # Uneven parts first, so that means and sums cannot be taken for each other; single samples are special.
        cuts.sort(key=lambda parts: (len({p.samples for p in parts}) == 1, min(p.samples for p in parts) < 2))
        return (
            Parts(self.flatten(whole), [self.flatten(p.batch) for p in parts], tuple(p.samples for p in parts))
            for parts in cuts
            if len(parts) > 1
        )


def _tries(size: int, total: int) -> list[tuple[int, int]]:
    """Sizes of the two parts, the best first: uneven, so that means and sums cannot be taken for each other."""
    most = min(size, MOST_SAMPLES)
    found = [(most, most - 1), (most, most), (2, 1), (1, 1)]
    return [pair for pair in dict.fromkeys(found) if min(pair) > 0 and sum(pair) <= total]


def sample_window(
    leaves: Sequence[Any],
    places: Sequence[int],
    microbatch_size: int,
    sizes: tuple[int, int],
    sums: frozenset[int] = frozenset(),
    free: frozenset[int] = frozenset(),
) -> Parts:
    """The samples on both sides of the first cut of a batch; `places` are the leaves that hold samples."""
    total = int(leaves[places[0]].shape[0])
    start = min(max(0, microbatch_size - sizes[0]), total - sum(sizes))

    def rows(first: int, count: int) -> list[Any]:
        held = [i in places and leaf.shape[0] == total for i, leaf in enumerate(leaves)]
        return [leaf.narrow(0, first, count) if samples else leaf for leaf, samples in zip(leaves, held)]

    parts = rows(start, sizes[0]), rows(start + sizes[0], sizes[1])
    return Parts(rows(start, sum(sizes)), parts, sizes, sums, free)


def _places(recording: Recording, leaves: Sequence[Any]) -> tuple[int, ...]:
    """The leaves that hold samples."""
    if recording.batching is not None:
        return recording.batching.places
    try:
        return batching_of(leaves, [item.path for item in recording.inputs]).places
    except PlanError:
        return ()


def _with_numbers(split: Parts, weighed: Weighed) -> Parts:
    """The same samples with the numbers of their batch, which the weights are made of."""
    whole = weighed.numbers(split.whole, (sum(split.sizes),)).inputs.values()
    numbers = weighed.numbers(split.whole, split.sizes).inputs.values()
    parts = tuple(
        [*part, *(number[i] if isinstance(number, tuple) else number for number in numbers)]
        for i, part in enumerate(split.parts)
    )
    alone = [number[0] if isinstance(number, tuple) else number for number in whole]
    sums = frozenset(i for i, law in enumerate(weighed.laws) if law == "sum")
    return replace(split, whole=[*split.whole, *alone], parts=parts, sums=sums)


def leaves_that_disagree(recording: Recording, leaves: Sequence[Any]) -> list[str]:
    """Tensors of the batch that do not hold its samples: they go to every micro-batch as they are."""
    places = _places(recording, leaves)
    return [
        f"{spec.path} {tuple(leaf.shape)}"
        for i, (spec, leaf) in enumerate(zip(recording.inputs, leaves))
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and i not in places
    ]
