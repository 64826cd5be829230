"""Batches that are cut as containers: their samples lie in one piece, and rows of their leaves mean nothing alone.

A batch of graphs is cut into graphs (PyG, chemprop); any other by the method ``split(batch, n)`` of the user's module. What
is known to hold several samples in one piece, and can be cut by neither, is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pipepart.errors import PlanError
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import BatchDim, batching_of, leaf_name
from pipepart.recording.inputs.trees import library_of
from pipepart.samples.molecules import is_molecules, molecules_of, put_together

__all__ = ["Piece", "Pieces", "other_batches", "own_split", "pieces_of"]


@dataclass(frozen=True)
class Piece:
    """One part of a batch and how many samples it holds."""

    batch: Any
    samples: int


@dataclass(frozen=True)
class Pieces:
    """How the batches of a run are cut as containers."""

    split: Callable[[Any, int], Sequence[Any]] | None
    """The module's own; None: graphs are cut by what they offer."""
    batch_dim: BatchDim
    call: bool
    """The batch is a pair of positional and named arguments."""

    def samples(self, batch: Any) -> int:
        graphs = [item for item, _ in _graph_batches(batch)]
        if graphs:
            return _count(graphs[0])
        leaves, tree = trees.flatten(batch)
        paths = [_without_call(path, self.call) for path in trees.leaf_paths(tree)]
        sizes = {int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        named = isinstance(self.batch_dim, Mapping) and any(dim is not None for dim in self.batch_dim.values())
        if self.split is not _one_part and len(sizes) > 1 and not named:
            raise PlanError(
                f"the number of samples of a batch is not clear: its leaves have {sorted(sizes)} rows. Name a leaf that has "
                f"one row for each sample: batch_dim={{'targets': 0}}; there are {[leaf_name(path) for path in paths]}"
            )
        return batching_of(leaves, paths, self.batch_dim).samples

    def cut(self, batch: Any, count: int) -> list[Piece]:
        """At most `count` parts."""
        if self.split is None:
            return _by_graphs(batch, count)
        given = _the_batch(batch) if self.call else batch
        parts = self.split(given, count)
        if not isinstance(parts, (list, tuple)) or not 1 <= len(parts) <= count:
            got = f"{len(parts)} of them" if isinstance(parts, (list, tuple)) else type(parts).__name__
            raise PlanError(f"split(batch, {count}): expected a list of 1 to {count} batches, got {got}")
        whole = [_call_of(part, batch) for part in parts] if self.call else list(parts)
        return [Piece(part, self.samples(part)) for part in whole]

    def others(self, batch: Any) -> list[Any]:
        """Batches of other sizes than this one, to record on: one graph more, or else the first of two parts."""
        if self.split is None:
            total = self.samples(batch)
            return [_chosen(batch, [[*range(total), 0]])[0]]
        parts = self.cut(batch, 2)
        return [parts[0].batch] if len(parts) > 1 else []


def pieces_of(batch: Any, root: nn.Module | None, batch_dim: BatchDim, call: bool, count: int) -> Pieces | None:
    """How a batch is cut if not along a dimension of its leaves; None if it is. Refuses what cannot be cut."""
    split = own_split(root)
    if split is not None:
        return Pieces(split, batch_dim, call)
    if _graph_batches(batch):
        return Pieces(None, batch_dim, call)
    known = [(path, item) for path, item in _containers(batch) if _in_one_piece(item)]
    if known and count > 1:
        path, item = known[0]
        raise PlanError(
            f"the batch cannot be cut into {count} micro-batches: {path or 'it'} is a {type(item).__name__}, which holds "
            "several samples in one piece.\n  expected: leaves with a dimension for the samples, or a batch that can be cut\n"
            "  do: give the module a method `split(self, batch, n)` that returns a list of at most n batches of the same "
            "structure, or use microbatches=1"
        )
    return Pieces(_one_part, batch_dim, False) if known else None


def _one_part(batch: Any, count: int) -> list[Any]:
    return [batch]


def own_split(root: nn.Module | None) -> Callable[[Any, int], Sequence[Any]] | None:
    """The method ``split(batch, n)`` of a module; a method of that name with other parameters is something else."""
    method = getattr(root, "split", None)
    if not inspect.ismethod(method):
        return None
    return method if list(inspect.signature(method).parameters) == ["batch", "n"] else None


def _containers(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """All containers in a batch with their paths, those that are no plain containers included."""
    from pipepart.recording.inputs.trees import opened

    parts = opened(value)
    if parts is None or _in_one_piece(value) or _is_graph_batch(value):
        return [(path, value)]
    found: list[tuple[str, Any]] = []
    for key, child in zip(parts.keys, parts.children):
        found += _containers(child, leaf_name(f"{path}[{key!r}]") if not path else f"{path}.{key}")
    return found


def _in_one_piece(value: Any) -> bool:
    if isinstance(value, PackedSequence) or library_of(value, "dgl", "DGLGraph"):
        return True
    if library_of(value, "chemprop", "BatchMolGraph"):
        return not is_molecules(value)
    return library_of(value, "torch_geometric", "BaseData") and not _is_graph_batch(value)


def _is_graph_batch(value: Any) -> bool:
    return is_molecules(value) or (library_of(value, "torch_geometric", "Batch") and hasattr(value, "to_data_list"))


def _count(value: Any) -> int:
    return len(value) if is_molecules(value) else int(value.num_graphs)


def _graph_batches(batch: Any) -> list[tuple[Any, str]]:
    return [(item, path) for path, item in _containers(batch) if _is_graph_batch(item)]


def _by_graphs(batch: Any, count: int) -> list[Piece]:
    """Batches of graphs are taken apart into graphs and put together in parts; tensors beside them are cut by samples."""
    found = _graph_batches(batch)
    total = _count(found[0][0])
    for item, path in found:
        if _count(item) != total:
            raise PlanError(f"the batch has {total} graphs in {found[0][1]} and {_count(item)} in {path}")
    count = min(count, total)
    sizes = [total // count + (i < total % count) for i in range(count)]
    starts = [sum(sizes[:i]) for i in range(count)]
    parts = _chosen(batch, [range(start, start + size) for start, size in zip(starts, sizes)])
    return [Piece(part, size) for part, size in zip(parts, sizes)]


def _chosen(batch: Any, chosen: Sequence[Sequence[int]]) -> list[Any]:
    """Batches of some graphs each, by their positions; every graph batch is taken apart once."""
    found = [item for item, _ in _graph_batches(batch)]
    graphs = {id(item): molecules_of(item) if is_molecules(item) else item.to_data_list() for item in found}
    total = len(next(iter(graphs.values())))

    def part(value: Any, positions: Sequence[int]) -> Any:
        if id(value) in graphs and is_molecules(value):
            return put_together(value, [graphs[id(value)][i] for i in positions])
        if id(value) in graphs:
            kind: Any = next(kind for kind in type(value).__mro__ if kind.__name__ == "Batch")
            followed = [name for name in value.keys() if f"{name}_batch" in value and f"{name}_ptr" in value]  # noqa: SIM118
            return kind.from_data_list([graphs[id(value)][i] for i in positions], follow_batch=followed)
        if isinstance(value, torch.Tensor):
            if not value.dim() or value.shape[0] != total:
                return value
            in_row = isinstance(positions, range)
            return value[positions.start : positions.stop] if in_row else value[list(positions)]  # type: ignore[attr-defined]
        if isinstance(value, dict):
            return type(value)((key, part(item, positions)) for key, item in value.items())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return value._make(part(item, positions) for item in value)  # type: ignore[attr-defined]
        if isinstance(value, (list, tuple)):
            return type(value)(part(item, positions) for item in value)
        return value

    return [part(batch, positions) for positions in chosen]


def other_batches(batch: Any, root: nn.Module | None, call: bool) -> list[Any] | None:
    """Further batches to record on, where `batch` is cut as a container; None where it is cut along a dimension."""
    if own_split(root) is None and not _graph_batches(batch):
        return None
    pieces = pieces_of(batch, root, 0, call, 1)
    try:
        return pieces.others(batch) if pieces is not None else None
    except PlanError:  # the number of samples is not clear: for planning to say
        return None


def _the_batch(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = call
    if kwargs:
        return call
    return args[0] if len(args) == 1 else args


def _call_of(part: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = call
    if kwargs:
        return part
    return ((part,) if len(args) == 1 else tuple(part)), {}


def _without_call(path: str, call: bool) -> str:
    """``[0][1]['x']`` of a pair of arguments as the path in the arguments."""
    return path[3:] if call else path
