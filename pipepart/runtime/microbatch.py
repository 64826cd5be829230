"""Batches split into micro-batches along dim 0, and outputs of micro-batches merged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from pipepart.errors import PlanError
from pipepart.recording import Recording
from pipepart.recording.inputs.batching import batching_of
from pipepart.recording.recorded import GuardError
from pipepart.samples.pieces import Pieces

__all__ = [
    "MicrobatchSizes",
    "Whole",
    "add_up",
    "batch_size_of",
    "batched_inputs",
    "fitting_sizes",
    "fitting_split",
    "merge_outputs",
    "microbatch_sizes",
    "slice_leaves",
    "split_batch",
]  # fmt: skip


@dataclass(frozen=True)
class MicrobatchSizes:
    """The sizes of the micro-batches of a batch. The weight of a micro-batch is its share of the samples."""

    sizes: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        return sum(self.sizes)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(size / self.batch_size for size in self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def microbatch_sizes(batch_size: int, microbatches: int) -> MicrobatchSizes:
    """Split `batch_size` samples into `microbatches` parts whose sizes differ by one at most, the larger ones first."""
    if microbatches < 1:
        raise PlanError(f"microbatches must be at least 1, got {microbatches}")
    if batch_size < microbatches:
        raise PlanError(
            f"a batch of {batch_size} sample(s) cannot be split into {microbatches} micro-batches: each of them needs "
            f"at least one sample. Use microbatches={max(batch_size, 1)} or less, a larger batch, or drop_last=True in the "
            f"DataLoader if only the last batch is that small."
        )
    base, more = divmod(batch_size, microbatches)
    return MicrobatchSizes(tuple(base + (index < more) for index in range(microbatches)))


class Whole(list[Any]):
    """The leaves of a batch that is split as a container, and the batch itself."""

    def __init__(self, leaves: Sequence[Any], pieces: Pieces, batch: Any, flatten: Callable[[Any], list[Any]]) -> None:
        super().__init__(leaves)
        self.samples = pieces.samples(batch)
        self._pieces, self._batch, self._flatten = pieces, batch, flatten

    def split(self, count: int) -> tuple[list[list[Any]], MicrobatchSizes]:
        """Return the leaves of each part. Raises for a part for which the recording does not hold."""
        found = self._pieces.split(self._batch, count)
        sizes = MicrobatchSizes(tuple(piece.samples for piece in found))
        return [self._flatten(piece.batch) for piece in found], sizes


def split_batch(
    recording: Recording, leaves: Sequence[Any], microbatches: int
) -> tuple[list[list[Any]], MicrobatchSizes]:
    """Return the leaves of each micro-batch. A batch with fewer samples than `microbatches` gives one for each sample."""
    if isinstance(leaves, Whole):
        return leaves.split(min(microbatches, leaves.samples))
    batched = batched_inputs(recording)
    total = batch_size_of(leaves, batched)
    sizes = microbatch_sizes(total, min(total, microbatches))
    changed = recording.changed_inputs
    copied = [position for position, item in enumerate(recording.inputs) if item.name in changed]
    return slice_leaves(leaves, sizes, batched, copied), sizes


def batched_inputs(recording: Recording) -> tuple[int, ...] | None:
    """Return the inputs of a recording that hold samples; None: those with the size of the batch."""
    return recording.batching.places if recording.batching is not None else None


def fitting_split(
    recording: Recording, leaves: Sequence[Any], microbatches: int
) -> tuple[list[list[Any]], MicrobatchSizes] | None:
    """Split a batch so that the recording holds for every part; return None if no way is found.

    Models may treat a single sample differently, so a last batch that would give parts of two samples and of one is split
    into fewer parts.
    """
    total = leaves.samples if isinstance(leaves, Whole) else batch_size_of(leaves, batched_inputs(recording))
    most = min(total, microbatches)
    if not total:
        return None
    for count in dict.fromkeys((most, max(1, min(most, total // 2)), 1)):
        try:
            parts, sizes = split_batch(recording, leaves, count)
        except GuardError:
            continue
        if all(
            recording.stale(part) is None for part in (parts if isinstance(leaves, Whole) else (parts[0], parts[-1]))
        ):
            return parts, sizes
    return None


def fitting_sizes(recording: Recording, leaves: Sequence[Any], microbatches: int) -> MicrobatchSizes | None:
    """Return the sizes of `fitting_split`."""
    found = fitting_split(recording, leaves, microbatches)
    return None if found is None else found[1]


def batch_size_of(leaves: Sequence[Any], batched: Sequence[int] | None = None) -> int:
    """Return the number of samples of a batch: dim 0 of the leaves `batched`, or the most frequent size of dim 0."""
    if isinstance(leaves, Whole):
        return leaves.samples
    if not batched:
        return batching_of(leaves, [f"leaf {i}" for i in range(len(leaves))]).samples
    return int(leaves[batched[0]].shape[0])


def slice_leaves(
    leaves: Sequence[Any],
    sizes: MicrobatchSizes,
    batched: Sequence[int] | None = None,
    copied: Collection[int] = frozenset(),
) -> list[list[Any]]:
    """Return the leaves of each micro-batch. Leaves without the batch dimension go to every micro-batch unchanged.

    `batched`: the leaves that hold samples; None: those with the size of the batch. Micro-batches are views of the batch,
    except for the leaves at the positions in `copied`, which are copied.
    """
    parts: list[list[Any]] = [[] for _ in sizes.sizes]
    for position, leaf in enumerate(leaves):
        tensor = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        whole = tensor and leaf.shape[0] == sizes.batch_size and (batched is None or position in batched)
        pieces = leaf.split(sizes.sizes) if whole else [leaf] * len(sizes)
        for part, piece in zip(parts, pieces):
            part.append(piece.clone() if position in copied and isinstance(piece, torch.Tensor) else piece)
    return parts


def add_up(values: Sequence[torch.Tensor], weights: Sequence[float] | None = None) -> torch.Tensor:
    """Return the sum of the values of micro-batches or, with weights of micro-batches, their mean over samples."""
    tensors = [value.detach() for value in values]
    if weights is not None:
        tensors = [tensor * weight for tensor, weight in zip(tensors, weights)]
    return torch.stack(tensors).sum(0)


def merge_outputs(
    outputs: Sequence[Sequence[Any]], sizes: MicrobatchSizes, laws: Sequence[str] | None = None
) -> list[Any]:
    """Merge the flat outputs of all micro-batches into those of the batch.

    Outputs with the law "sum" are added. Other scalars are means over samples; tensors with the batch dimension are
    concatenated; other tensors are means. Plain numbers are those of the whole batch already. Values that a step logs are not
    merged here: the user selects their reduction.
    """
    merged: list[Any] = []
    for values, law in zip(zip(*outputs), laws or repeat("")):
        if law == "sum" and all(isinstance(value, torch.Tensor) for value in values):
            merged.append(add_up(values))
            continue
        if not all(isinstance(value, torch.Tensor) for value in values):
            merged.append(_plain(values, law))
            continue
        tensors = [value.detach() for value in values]
        if len(tensors) == 1 and tensors[0].is_floating_point():
            merged.append(tensors[0])
            continue
        batched = all(t.dim() > 0 and t.shape[0] == size for t, size in zip(tensors, sizes.sizes))
        if batched:
            merged.append(torch.cat(tensors) if len(tensors) > 1 else tensors[0])
        elif all(t.shape == tensors[0].shape for t in tensors):
            dtype = tensors[0].dtype if tensors[0].is_floating_point() else torch.get_default_dtype()
            merged.append(add_up([tensor.to(dtype) for tensor in tensors], sizes.weights))
        else:
            merged.append(tensors)
    return merged


def _plain(values: Sequence[Any], law: str) -> Any:
    """Return a value of a result that is no tensor: a number of the whole batch, or a constant."""
    value = values[-1]
    if law == "unknown number" and len(values) > 1:
        raise PlanError(
            f"the step returns a Python number ({value} for the last of {len(values)} micro-batches), and its value for the "
            "whole batch is not known: it is not made from the batch alone, or loss='microbatch' is set. Return a tensor, "
            "compute the number outside of the step, or use microbatches=1."
        )
    return int(value) if law == "count" and value is not None else value
