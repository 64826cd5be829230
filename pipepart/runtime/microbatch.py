"""Cutting a batch into micro-batches along dim 0, and putting results together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipepart.capture import Recording
from pipepart.errors import PlanError

__all__ = ["MicrobatchSizes", "batch_size_of", "fitting_sizes", "merge_outputs", "microbatch_sizes", "slice_leaves"]


@dataclass(frozen=True)
class MicrobatchSizes:
    """How a batch is cut. Sizes may differ by one; the weight of a micro-batch in the loss is its share of the batch."""

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
    """Cut `batch_size` samples into `microbatches` parts that differ by one at most, the larger ones first."""
    if microbatches < 1:
        raise PlanError(f"microbatches must be at least 1, got {microbatches}")
    if batch_size < microbatches:
        raise PlanError(
            f"a batch of {batch_size} sample(s) cannot be cut into {microbatches} micro-batches: every micro-batch needs "
            f"at least one sample. Use microbatches={max(batch_size, 1)} or less, a larger batch, or drop_last=True in the "
            f"DataLoader if only the last batch is that small."
        )
    base, more = divmod(batch_size, microbatches)
    return MicrobatchSizes(tuple(base + (index < more) for index in range(microbatches)))


def fitting_sizes(recording: Recording, leaves: Sequence[Any], microbatches: int) -> MicrobatchSizes | None:
    """How a batch is cut so that the recording holds for every part; None if no way is found.

    Models may do something else for a single sample, so a last batch that would be cut into parts of two samples and of
    one is cut into fewer.
    """
    total = batch_size_of(leaves)
    most = min(total, microbatches)
    for count in dict.fromkeys((most, max(1, min(most, total // 2)), 1)):
        sizes = microbatch_sizes(total, count)
        parts = slice_leaves(leaves, sizes)
        if all(recording.stale(part) is None for part in (parts[0], parts[-1])):
            return sizes
    return None


def batch_size_of(leaves: Sequence[Any]) -> int:
    """The number of samples of a batch: dim 0 of its first tensor that has one."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise PlanError(
        "the batch has no tensor with a batch dimension: expected at least one tensor leaf with dim 0 = samples, "
        f"got leaves of type {[type(leaf).__name__ for leaf in leaves]}"
    )


def slice_leaves(leaves: Sequence[Any], sizes: MicrobatchSizes) -> list[list[Any]]:
    """The leaves of each micro-batch. Leaves without the batch dimension go to every micro-batch as they are."""
    parts: list[list[Any]] = [[] for _ in sizes.sizes]
    for leaf in leaves:
        whole = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == sizes.batch_size
        pieces = leaf.split(sizes.sizes) if whole else [leaf] * len(sizes)
        for part, piece in zip(parts, pieces):
            part.append(piece)
    return parts


def merge_outputs(outputs: Sequence[Sequence[Any]], sizes: MicrobatchSizes) -> list[Any]:
    """Put the flat outputs of all micro-batches together as one batch would have given them.

    Scalars are means over the samples; tensors with the batch dimension are concatenated; other float tensors are
    means; what is no tensor is taken from the last micro-batch.
    """
    merged: list[Any] = []
    for values in zip(*outputs):
        if not all(isinstance(value, torch.Tensor) for value in values):
            merged.append(values[-1])
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
            total = torch.zeros_like(tensors[0], dtype=dtype)
            for tensor, weight in zip(tensors, sizes.weights):
                total += tensor.to(dtype) * weight
            merged.append(total)
        else:
            merged.append(tensors)
    return merged
