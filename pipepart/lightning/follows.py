"""How a value of a step follows the number of samples, as seen in runs of the step at several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipepart.recording.inputs.batching import Batching

__all__ = ["UNSEEN", "Follows", "Sizes", "follows", "shape_of", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the batch in one run of a step."""

    samples: int | None
    """Number of samples. None: the batch is split as a container, and no dimension holds its samples."""
    others: tuple[tuple[int, ...], ...]
    """All other sizes of the batch."""


@dataclass(frozen=True)
class Follows:
    """Relation of a value to the number of samples, as seen in runs of a step at several sizes."""

    dims: tuple[int, ...] | None = None
    """Dimensions of a tensor that grow with the number of samples. None: only one number of samples was seen."""
    counts: bool = False
    """Whether the value is a number that is proportional to the number of samples."""

    def dim(self, shapes: Sequence[torch.Size], sizes: Sequence[int]) -> int | None:
        """The dimension along which values of micro-batches of `sizes` samples are concatenated; None if there is none.

        ValueError: the dimension is ambiguous.
        """
        if len({len(shape) for shape in shapes}) != 1:
            raise ValueError("the number of dimensions differs between micro-batches")
        every = range(len(shapes[0]))
        differ = {d for d in every if len({shape[d] for shape in shapes}) > 1}
        found = differ | set(self.dims or ())
        if self.dims is None and not differ:
            found = {d for d in every if all(shape[d] == size for shape, size in zip(shapes, sizes))}
        if len(found) > 1:
            raise ValueError(f"its dimensions {sorted(found)} all follow the number of samples")
        return next(iter(found), None)


UNSEEN = Follows()


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor. Reading them is not recorded."""
    with torch._C.DisableTorchFunction():
        return tuple(int(size) for size in tensor.shape)


def sizes_of(leaves: Iterable[Any], batching: Batching | None) -> Sizes:
    """The sizes of a batch as the step receives it. Reading them is not recorded."""
    samples: int | None = None
    others = []
    dims = batching.dims if batching is not None else ()
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        shape = shape_of(leaf)
        dim = dims[index] if index < len(dims) else None
        if dim is not None:
            samples = shape[dim] if samples is None else samples
            shape = shape[:dim] + shape[dim + 1 :]
        others.append(shape)
    return Sizes(samples, tuple(others))


def follows(seen: Mapping[Sizes, Any]) -> Follows:
    """Derive `Follows` from the shapes (or numbers) of one value in several runs."""
    pairs = [
        (a, b)
        for a in seen
        for b in seen
        if a != b and (a.samples is None or (a.samples < (b.samples or 0) and a.others == b.others))
    ]
    if not pairs:
        return UNSEEN
    first, second = pairs[0]
    if not isinstance(seen[first], tuple):
        proportional = first.samples and seen[first] * (second.samples or 0) == seen[second] * first.samples
        return Follows((), bool(proportional) and seen[first] != seen[second])
    if len({len(shape) for shape in seen.values()}) > 1:
        return UNSEEN
    every = range(len(seen[first]))
    return Follows(tuple(d for d in every if any(seen[a][d] != seen[b][d] for a, b in pairs)))
