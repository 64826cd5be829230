"""Batches that are split as containers: their samples lie in one piece, and single rows of their leaves have no meaning.

A batch of graphs (PyG, chemprop) is split into graphs, any other by the method ``split(batch, n)`` of the user's module. A
container that is known to hold several samples in one piece, and can be split by neither, is refused by name. A batch without
any tensor that has samples (of Python numbers, texts or scalars) is one sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pipepart.errors import PlanError
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import BatchDim, batching_of, leaf_name
from pipepart.recording.inputs.trees import library_of, opened

__all__ = ["Piece", "Pieces", "has_no_graphs", "other_batches", "pieces_of"]

_FIELDS: dict[str, tuple[str, str]] = {
    "V": ("atoms", ""), "E": ("bonds", ""), "edge_index": ("bonds", "atoms"), "rev_edge_index": ("bonds", "bonds"),
    "batch": ("atoms", "molecules"), "bond_batch": ("bonds", "molecules"),
}  # fmt: skip
"""For each field of a batch of chemprop, the meaning of its rows (of `edge_index`: its columns) and of its numbers, which
count from the beginning of the batch."""

_Molecule = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """A part of a batch and its number of samples."""

    batch: Any
    samples: int


@dataclass(frozen=True)
class Pieces:
    """The way in which the batches of a run are split as containers."""

    method: Callable[[Any, int], Sequence[Any]] | None
    """The module's own ``split``; None if batches of graphs are split into graphs."""
    batch_dim: BatchDim
    call: bool
    """Whether a batch is a pair of positional and named arguments."""
    undivided: bool = False
    """Whether no leaf of the batch has samples, so that the whole batch is one sample."""

    def samples(self, batch: Any) -> int:
        """Return the number of samples of a batch."""
        graphs = _graph_batches(batch)
        if graphs:
            return _count(graphs[0][1])
        if self.undivided:
            return 1
        leaves, tree = trees.flatten(batch)
        # Of a pair of arguments, paths begin inside the positional ones: [0][1]['x'] is [1]['x'].
        paths = [path[3:] if self.call else path for path in trees.leaf_paths(tree)]
        sizes = {int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
        named = isinstance(self.batch_dim, Mapping) and any(dim is not None for dim in self.batch_dim.values())
        if self.method is not _one_part and len(sizes) > 1 and not named:
            raise PlanError(
                f"the number of samples of a batch is not clear: its leaves have {sorted(sizes)} rows. Name a leaf that has "
                f"one row for each sample: batch_dim={{'targets': 0}}. The leaves are {[leaf_name(path) for path in paths]}"
            )
        return batching_of(leaves, paths, self.batch_dim).samples

    def split(self, batch: Any, count: int) -> list[Piece]:
        """Split a batch into at most `count` pieces."""
        if self.method is None:
            return _split_into_graphs(batch, count)
        parts = self.method(_given(batch) if self.call else batch, count)
        if not isinstance(parts, (list, tuple)) or not 1 <= len(parts) <= count:
            got = f"{len(parts)} of them" if isinstance(parts, (list, tuple)) else type(parts).__name__
            raise PlanError(
                f"the method split(batch, {count}) of the module: expected a list of 1 to {count} batches, got {got}"
            )
        whole = [_call_of(part, batch) for part in parts] if self.call else list(parts)
        return [Piece(part, self.samples(part)) for part in whole]

    def others(self, batch: Any) -> list[Any]:
        """Return batches of other sizes, to record with: one with one graph more, or the first of two pieces."""
        if self.method is None:
            return _chosen(batch, [[*range(self.samples(batch)), 0]])
        pieces = self.split(batch, 2)
        return [pieces[0].batch] if len(pieces) > 1 else []


def pieces_of(batch: Any, root: nn.Module | None, batch_dim: BatchDim, call: bool, count: int) -> Pieces | None:
    """Return the way in which a batch is split as a container; None if it is split along a dimension of its leaves."""
    method = _split_method(root)
    if method is not None or _graph_batches(batch):
        return Pieces(method, batch_dim, call)
    known = [(path, item) for path, item in _containers(batch) if _in_one_piece(item)]
    if known and count > 1:
        path, item = known[0]
        raise PlanError(
            f"the batch cannot be split into {count} micro-batches: {path or 'it'} is a {type(item).__name__}, which holds "
            "several samples in one piece.\n  expected: leaves with a dimension for the samples, or a batch that can be "
            "split\n  do: give the module a method `split(self, batch, n)` that returns a list of at most n batches of the "
            "same structure, or use microbatches=1"
        )
    if known:
        return Pieces(_one_part, batch_dim, False)
    return Pieces(_one_part, batch_dim, False, undivided=True) if _without_samples(batch, batch_dim) else None


def has_no_graphs(batch: Any) -> bool:
    """Return whether a batch of graphs has no graph."""
    return any(_count(item) == 0 for _, item in _graph_batches(batch))


def other_batches(batch: Any, root: nn.Module | None, call: bool) -> list[Any] | None:
    """Return further batches to record with, if `batch` is split as a container; None if it is split along a dimension."""
    method = _split_method(root)
    if method is None and not _graph_batches(batch):
        return None
    try:
        return Pieces(method, 0, call).others(batch)
    except PlanError:  # the number of samples is not clear, which planning reports
        return None


def _without_samples(batch: Any, batch_dim: BatchDim) -> bool:
    """Return whether no leaf of a batch is a tensor with a dimension for the samples."""
    if isinstance(batch_dim, Mapping) and any(dim is not None for dim in batch_dim.values()):
        return False  # the user has named a leaf with samples
    least = 0 if isinstance(batch_dim, Mapping) else batch_dim
    leaves = trees.leaves_of(batch)
    return bool(leaves) and not any(isinstance(leaf, torch.Tensor) and leaf.dim() > least for leaf in leaves)


def _one_part(batch: Any, count: int) -> list[Any]:
    return [batch]


def _split_method(root: nn.Module | None) -> Callable[[Any, int], Sequence[Any]] | None:
    """Return the method ``split(batch, n)`` of a module; a method of that name with other parameters is ignored."""
    method = getattr(root, "split", None)
    if not inspect.ismethod(method):
        return None
    return method if list(inspect.signature(method).parameters) == ["batch", "n"] else None


def _given(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Return the batch in a pair of arguments, as the user's ``split`` takes it."""
    args, kwargs = call
    if kwargs:
        return call
    return args[0] if len(args) == 1 else args


def _call_of(part: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Return a part, which the user's ``split`` has returned, as a pair of arguments."""
    args, kwargs = call
    if kwargs:
        return part
    return ((part,) if len(args) == 1 else tuple(part)), {}


# ---- containers in a batch


def _containers(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a batch, and its containers in one piece, with their paths."""
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
        return not _is_molecules(value)
    return library_of(value, "torch_geometric", "BaseData") and not _is_graph_batch(value)


def _is_graph_batch(value: Any) -> bool:
    return _is_molecules(value) or (library_of(value, "torch_geometric", "Batch") and hasattr(value, "to_data_list"))


def _is_molecules(value: Any) -> bool:
    """Return whether this is a batch of molecules of chemprop whose fields are known."""
    return library_of(value, "chemprop", "BatchMolGraph") and set(_fields(value)) <= set(_FIELDS)


def _graph_batches(batch: Any) -> list[tuple[str, Any]]:
    return [(path, item) for path, item in _containers(batch) if _is_graph_batch(item)]


def _count(value: Any) -> int:
    return len(value) if _is_molecules(value) else int(value.num_graphs)


# ---- batches of graphs


def _split_into_graphs(batch: Any, count: int) -> list[Piece]:
    """Split batches of graphs into graphs, and tensors beside them into samples."""
    counts = [(path, _count(item)) for path, item in _graph_batches(batch)]
    first, total = counts[0]
    for path, other in counts:
        if other != total:
            raise PlanError(
                f"the batch has {total} graphs in {first} and {other} in {path}; expected one number of graphs in all of them"
            )
    count = min(count, total)
    sizes = [total // count + (i < total % count) for i in range(count)]
    starts = [sum(sizes[:i]) for i in range(count)]
    parts = _chosen(batch, [range(start, start + size) for start, size in zip(starts, sizes)])
    return [Piece(part, size) for part, size in zip(parts, sizes)]


def _chosen(batch: Any, chosen: Sequence[Sequence[int]]) -> list[Any]:
    """Return batches of some graphs each, by their positions; every graph batch is taken apart once."""
    found = [item for _, item in _graph_batches(batch)]
    graphs = {id(item): _molecules_of(item) if _is_molecules(item) else item.to_data_list() for item in found}
    total = len(next(iter(graphs.values())))

    def part(value: Any, positions: Sequence[int]) -> Any:
        if id(value) in graphs:
            own = [graphs[id(value)][i] for i in positions]
            if _is_molecules(value):
                return _batch_of_molecules(value, own)
            kind: Any = next(kind for kind in type(value).__mro__ if kind.__name__ == "Batch")
            followed = [name for name in value.keys() if f"{name}_batch" in value and f"{name}_ptr" in value]  # noqa: SIM118
            return kind.from_data_list(own, follow_batch=followed)
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


def _molecules_of(batch: Any) -> list[_Molecule]:
    """Return the fields of each molecule; numbers that count something begin at 0 in each of them."""
    held, count = _fields(batch), len(batch)
    numbers = torch.arange(count, device=held["batch"].device)
    owners = {"atoms": held["batch"], "bonds": held["batch"][held["edge_index"][0]]}
    starts = {what: torch.searchsorted(owner, numbers).tolist() for what, owner in owners.items()}
    sizes = {what: torch.bincount(owner, minlength=count).tolist() for what, owner in owners.items()}
    starts["molecules"] = list(range(count))
    found = []
    for i in range(count):
        own: _Molecule = {}
        for name, value in held.items():
            rows, counted = _FIELDS[name]
            part = value.narrow(_dim(name), starts[rows][i], sizes[rows][i])
            own[name] = part - starts[counted][i] if counted else part
        found.append(own)
    return found


def _batch_of_molecules(like: Any, molecules: Sequence[_Molecule]) -> Any:
    """Return a batch of the same class with these molecules."""
    made = object.__new__(type(like))
    offsets = {"atoms": 0, "bonds": 0, "molecules": 0}
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in _fields(like)}
    for own in molecules:
        for name, value in own.items():
            counted = _FIELDS[name][1]
            parts[name].append(value + offsets[counted] if counted else value)
        for what, size in (("atoms", len(own["V"])), ("bonds", len(own["E"])), ("molecules", 1)):
            offsets[what] += size
    for name, values in parts.items():
        object.__setattr__(made, name, torch.cat(values, _dim(name)))
    object.__setattr__(made, "_BatchMolGraph__size", len(molecules))
    return made


def _dim(name: str) -> int:
    return 1 if name == "edge_index" else 0


def _fields(batch: Any) -> dict[str, torch.Tensor]:
    held = {field.name: getattr(batch, field.name, None) for field in fields(batch)}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
