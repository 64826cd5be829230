"""The leaves of a batch that hold samples, and the dimension of the samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipepart.errors import ConfigError, PlanError, did_you_mean
from pipepart.recording.inputs import trees
from pipepart.values import shortened

__all__ = ["BatchDim", "Batching", "batching_of", "check_batch_dim", "first_in_result", "leaf_name"]

BatchDim = int | Mapping[str, int | None]
"""The dimension of the samples, for all leaves or by path (``"x"``, ``"0.mask"``); a leaf with None is not split."""


@dataclass(frozen=True)
class Batching:
    """The dimension of the samples of each leaf of a batch; a leaf with None goes whole to every micro-batch."""

    dims: tuple[int | None, ...]
    samples: int
    """Number of samples."""

    @property
    def in_pieces(self) -> bool:
        """Whether batches are split as containers, with leaves of different sizes, and not along a dimension."""
        return not self.places

    @property
    def places(self) -> tuple[int, ...]:
        """The positions of the leaves that are split."""
        return tuple(index for index, dim in enumerate(self.dims) if dim is not None)

    @property
    def other_dim(self) -> int:
        """The dimension of the samples in results: the most frequent non-zero dimension of the leaves; 0 if there is none."""
        others = Counter(dim for dim in self.dims if dim)
        return others.most_common(1)[0][0] if others else 0

    def first(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves with their samples along dimension 0."""
        return [leaf.movedim(dim, 0) if dim else leaf for leaf, dim in zip(leaves, self._all(leaves))]

    def back(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves with their samples along their own dimensions again: the opposite of `first`."""
        return [leaf.movedim(0, dim) if dim else leaf for leaf, dim in zip(leaves, self._all(leaves))]

    def _all(self, leaves: Sequence[Any]) -> list[int | None]:
        return [*self.dims, *[None] * (len(leaves) - len(self.dims))]


def check_batch_dim(batch_dim: Any) -> None:
    """Raise a `ConfigError` for an invalid `batch_dim`, before any process is started."""
    values = batch_dim.values() if isinstance(batch_dim, Mapping) else [batch_dim]
    fine = all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values if v is not None)
    if (
        not fine
        or batch_dim is None
        or (isinstance(batch_dim, Mapping) and not all(isinstance(k, str) for k in batch_dim))
    ):
        raise ConfigError(
            f"batch_dim={shortened(batch_dim)}: expected the dimension of the samples (0, 1, ...), or a mapping from the paths "
            "of leaves to dimensions, such as {'x': 1, 'class_weights': None}"
        )


def leaf_name(path: str) -> str:
    """Return the path ``batch['x'][0]`` as the key ``x.0`` of a mapping."""
    keys = re.findall(r"\[((?:'(?:[^'\\]|\\.)*'|\"[^\"]*\"|[^\]])*)\]", path)
    head = path.partition("[")[0]
    return ".".join([*([head] if head and head != "batch" else []), *(key.strip("'\"") for key in keys)])


def batching_of(leaves: Sequence[Any], paths: Sequence[str], batch_dim: BatchDim = 0) -> Batching:
    """Return the leaves that are split, with their dimensions.

    The number of samples is the most frequent size along these dimensions, the first one if several are equally frequent.
    A leaf of another size goes whole to every micro-batch; all leaves that the mapping names must have the same size.
    """
    given = dict(batch_dim) if isinstance(batch_dim, Mapping) else {}
    usual = 0 if isinstance(batch_dim, Mapping) else batch_dim
    names = [leaf_name(path) for path in paths]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ConfigError(f"batch_dim: the batch has no leaf {unknown[0]!r}: {did_you_mean(unknown[0], names)}")
    wanted: list[int | None] = []
    for leaf, name, path in zip(leaves, names, paths):
        dim = given.get(name, usual)
        tensor = isinstance(leaf, torch.Tensor)
        if name in given and dim is not None and (not tensor or leaf.dim() <= dim):
            what = f"a tensor of {leaf.dim()} dimension(s)" if tensor else f"a {type(leaf).__name__}"
            raise ConfigError(f"batch_dim: {path} is {what}; expected a tensor with dimension {dim}, or None for it")
        wanted.append(dim if tensor and dim is not None and leaf.dim() > dim else None)
    sizes = {i: int(leaves[i].shape[dim]) for i, dim in enumerate(wanted) if dim is not None}
    if not sizes:
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise PlanError(
            f"the batch has no tensor with a batch dimension: expected at least one tensor leaf with dimension {usual} = "
            f"samples, got leaves of type {kinds}. Name the dimension (batch_dim=...), give the module a method "
            "`split(batch, n)` that splits its batches, or use microbatches=1."
        )
    named = {i: size for i, size in sizes.items() if names[i] in given}
    if len(set(named.values())) > 1:
        shown = ", ".join(f"{paths[i]} has {size} along dimension {wanted[i]}" for i, size in named.items())
        raise PlanError(
            f"batch_dim: the leaves that it names disagree on the number of samples: {shown}; expected equal sizes"
        )
    samples = Counter((named or sizes).values()).most_common(1)[0][0]
    dims = [dim if i in sizes and sizes[i] == samples else None for i, dim in enumerate(wanted)]
    return Batching(tuple(dims), samples)


def first_in_result(result: Any, values: Sequence[Any], batching: Batching | None, moved: list[int]) -> Any:
    """Return the result with its samples along dimension 0, if the batch has them along another dimension.

    `moved` gets the former dimension of each leaf, 0 for leaves that are not moved.
    """
    moved.clear()
    if batching is None or not batching.other_dim:
        return result
    dim = batching.other_dim
    leaves, tree = trees.flatten(result)
    with torch._C.DisableTorchFunction():  # these reads of sizes are not recorded
        samples = int(values[batching.places[0]].shape[0])
        held = [isinstance(v, torch.Tensor) and v.dim() > dim and v.shape[dim] == samples for v in leaves]
    moved += [dim if samples_there else 0 for samples_there in held]
    return trees.unflatten([v.movedim(d, 0) if d else v for v, d in zip(leaves, moved)], tree)
