"""Division of the graph of a chunk into pieces, in the order of its ops: some are compiled, others run as they are.

A compiled piece takes and returns tensors. These ops are outside of it: ops that read a number which changes from step to
step, ops with effects in Python (metrics, attributes), modules of the user that are kept whole, heads in slices, and
ops that draw from the stream of the stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from pipepart.recording.execution.draws import before_draw
from pipepart.recording.execution.ops_run import RecordedGraph
from pipepart.recording.op import has_op, op_of
from pipepart.recording.recorded_run import intrinsics
from pipepart.recording.recorded_run.contexts import Recomputed
from pipepart.recording.recorded_run.ops import has_global_hooks, is_torch_leaf
from pipepart.runtime.deferred import original
from pipepart.runtime.sliced_loss import sliced_cross_entropy

__all__ = ["Apart", "Piece", "Site", "is_watched", "pieces_of", "sites_of"]

_OUTSIDE = (
    intrinsics.check,
    intrinsics.method_of,
    intrinsics.set_attribute,
    intrinsics.set_data,
    sliced_cross_entropy,
)
_FEW = 2
"""The number of ops below which a piece is not worth a call of a compiled function."""


@dataclass(frozen=True, eq=False)
class Site:
    """A place of a module that holds a tensor: its dictionary of parameters, buffers or attributes, and the name there."""

    holder: dict[str, Any]
    name: str

    @property
    def value(self) -> Any:
        return self.holder[self.name]


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive ops of a chunk."""

    graph: RecordedGraph
    """The ops, as they run without a compiler."""
    traced: RecordedGraph | None
    """The ops, as they are compiled; None if the piece is not compiled."""
    takes: tuple[str, ...]
    """Names of values: inputs of the chunk, or results of earlier pieces."""
    makes: tuple[str, ...]
    frees: tuple[str, ...]
    """Values that no later piece reads."""


@dataclass(frozen=True)
class Apart:
    """What stays outside of compiled pieces in this run."""

    numbers: Collection[str]
    """Inputs of the chunk that are numbers."""
    draws: bool = False
    """Whether ops that draw random numbers stay outside."""
    layers: tuple[type, ...] = ()
    """Kinds of layers that code outside of the graph changes during a step."""


def pieces_of(chunk: RecordedGraph, apart: Apart) -> tuple[Piece, ...]:
    """Divide a chunk."""
    nodes = [node for node in chunk.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    outside = _outside(chunk, nodes, apart)
    if outside and chunk._regions:  # a region of autocast or of gradient mode must not be divided
        outside |= {node for node in nodes if not has_op(node) and node.target is not before_draw}
    runs = [(out, list(run)) for out, run in groupby(nodes, lambda node: node in outside)]
    runs = [(out or _count(run) < _FEW, run) for out, run in runs]
    merged: list[tuple[bool, list[fx.Node]]] = []
    for out, run in runs:
        if merged and merged[-1][0] == out:
            merged[-1][1].extend(run)
        else:
            merged.append((out, run))
    results = next(iter(chunk.graph.find_nodes(op="output"))).args[0]
    return tuple(_made(chunk, merged, tuple(results)))


def _outside(chunk: RecordedGraph, nodes: Sequence[fx.Node], apart: Apart) -> set[fx.Node]:
    changing = {node for node in chunk.graph.find_nodes(op="placeholder") if node.name in apart.numbers}
    found: set[fx.Node] = set()
    for before, node in zip([None, *nodes], nodes):
        drawing = before is not None and before.target is before_draw
        if not changing.isdisjoint(node.all_input_nodes):
            found.add(node)
            if has_op(node) and op_of(node).is_number:
                changing.add(node)
        # The parts of a tuple are taken out where it is made.
        whole = any(s in found and has_op(s) and _is_whole(s) for s in node.all_input_nodes)
        if (
            whole
            or _stays(chunk, node, apart.layers)
            or (drawing and (apart.draws or not _draws_by_torch(chunk, node)))
        ):
            found.add(node)
        if drawing and node in found:
            assert before is not None
            found.add(before)
    return found


def _is_whole(node: fx.Node) -> bool:
    return op_of(node).shape is None and not op_of(node).is_number


def _stays(chunk: RecordedGraph, node: fx.Node, apart: tuple[type, ...]) -> bool:
    if node.target in _OUTSIDE or hasattr(node.target, "stable_name"):
        return True
    if has_op(node) and op_of(node).dynamic_shape:
        return True
    if node.op == "call_module":
        layer = original(chunk.__dict__[str(node.target)])
        return not is_torch_leaf(layer) or isinstance(layer, (torch.jit.ScriptModule, nn.RNNBase, *apart))
    if node.target is intrinsics.call_object:
        reference = node.args[0]
        called = chunk.__dict__.get(str(reference.target)) if isinstance(reference, fx.Node) else None
        return not isinstance(called, Recomputed)
    return False


def _draws_by_torch(chunk: RecordedGraph, node: fx.Node) -> bool:
    return node.op != "call_module" or is_torch_leaf(original(chunk.__dict__[str(node.target)]))


def _count(run: Sequence[fx.Node]) -> int:
    """Return the number of ops of a run that compute something."""
    return sum(has_op(node) and not op_of(node).is_number and op_of(node).shape is not None for node in run)


def _made(
    chunk: RecordedGraph, runs: Sequence[tuple[bool, list[fx.Node]]], results: tuple[Any, ...]
) -> Iterator[Piece]:
    last = {node: len(runs) for node in results if isinstance(node, fx.Node)}
    for index, (_, run) in reversed(list(enumerate(runs))):
        for node in run:
            for source in node.all_input_nodes:
                last.setdefault(source, index)
    for index, (out, run) in enumerate(runs):
        inside = set(run)
        sources = dict.fromkeys(s for n in run for s in n.all_input_nodes)
        takes = [s for s in sources if s.op != "get_attr" and s not in inside]
        makes = [node for node in run if last.get(node, index) > index]
        frees = tuple(node.name for node in takes if last[node] == index)
        graph = _copied(run, takes, makes)
        used: dict[str, Any] = {}
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                name = str(node.target).partition(".")[0]
                used[name] = chunk.__dict__[name]
        plain = RecordedGraph(chunk._root, graph, used, (), False)
        traced = None
        if not out:
            traced = RecordedGraph(
                chunk._root, graph, {name: original(value) for name, value in used.items()}, (), False
            )
        yield Piece(plain, traced, tuple(n.name for n in takes), tuple(n.name for n in makes), frees)


def _copied(run: Sequence[fx.Node], takes: Sequence[fx.Node], makes: Sequence[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in takes}
    for node in run:
        for source in node.all_input_nodes:
            if source not in copies:
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in makes))
    return graph


def sites_of(traced: RecordedGraph) -> tuple[list[Site], list[nn.Module], list[Site]]:
    """Return the tensors that a piece reads, the modules that it calls, and the other values that it reads."""
    tensors: dict[tuple[int, str], Site] = {}
    modules: dict[int, nn.Module] = {}
    values: list[Site] = []
    for node in traced.graph.nodes:
        if node.op == "call_module":
            for module in traced.__dict__[str(node.target)].modules():
                modules[id(module)] = module
                for holder in (module._parameters, module._buffers):
                    for name, value in holder.items():
                        if value is not None:
                            tensors.setdefault((id(holder), name), Site(holder, name))
        elif node.op == "get_attr":
            *path, name = str(node.target).split(".")
            owner: Any = traced
            for part in path:
                owner = getattr(owner, part)
            holder = next((h for h in _holders(owner) if name in h), None)
            if holder is None:
                raise AttributeError(f"{node.target} is computed by its module")
            site = Site(holder, name)
            if isinstance(site.value, torch.Tensor):
                tensors.setdefault((id(holder), name), site)
            elif isinstance(site.value, Recomputed):
                body: Any = site.value.body
                below = sites_of(body)
                tensors.update(((id(s.holder), s.name), s) for s in below[0])
                modules.update((id(module), module) for module in below[1])
                values += below[2]
            else:
                values.append(site)
    return list(tensors.values()), list(modules.values()), values


def _holders(owner: Any) -> list[dict[str, Any]]:
    own: Mapping[str, Any] = vars(owner)
    return [h for h in (own.get("_parameters"), own.get("_buffers"), own) if isinstance(h, dict)]


def is_watched(module: nn.Module) -> bool:
    """Return whether code of the user runs with each call of a module."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module) or has_global_hooks()
