"""Emission of recorded nodes as a runnable graph, with regions of gradient mode, autocast and recomputation."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.fx.node import map_aggregate

from pipepart.devices import usable_autocast
from pipepart.recording.execution.draws import before_draw, number_of
from pipepart.recording.execution.ops_run import RecordedGraph, resolve, used_tensors
from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.contexts import Recomputed, regions_of, set_switches
from pipepart.recording.recorded_run.intrinsics import call_object

if TYPE_CHECKING:
    from pipepart.recording.recorded import Recording

__all__ = ["executable"]


def executable(
    recording: Recording,
    nodes: Sequence[fx.Node] | None = None,
    inputs: Sequence[fx.Node] | None = None,
    outputs: Sequence[Any] | None = None,
    device: torch.device | None = None,
    sizes: Mapping[fx.Node, tuple[fx.Node, int]] | None = None,
    depth: int | None = 0,
) -> RecordedGraph:
    """Return a module of these nodes (by default all nodes) that maps values of `inputs` to values of `outputs`.

    With `device`, tensors that the model made on the device of the example are made there instead, and constants of the
    recording are there. `sizes` are numbers
    that are read from a dimension of an input. Regions of activation checkpointing below `depth` levels of nesting are
    run again in backward; with None, each op is a node of the module.
    """
    everything = list(recording.graph.nodes)
    if nodes is None:
        nodes = [node for node in everything if node.op not in ("placeholder", "output", "get_attr")]
    if inputs is None:
        inputs = recording.graph.find_nodes(op="placeholder")
    if outputs is None:
        outputs = everything[-1].args[0]  # type: ignore[assignment]
    assert outputs is not None
    writer = _Writer(recording, nodes, inputs, outputs, None if device == recording.device else device, depth)
    writer.take_sizes(sizes or {})
    rest = [node for node in nodes if node not in writer.new]
    for region, members in [(None, rest)] if depth is None else regions_of(rest, depth):
        if region is not None:
            writer.recompute(region, members)
            continue
        for node in members:
            writer.write(node)
    return writer.finish()


class _Names:
    """Short attribute names for the objects that a runnable graph refers to."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.by_path: dict[str, str] = {}

    def add(self, path: str, value: Any) -> str:
        if path not in self.by_path:
            name = "m_" + "".join(c if c.isalnum() else "_" for c in path)
            while name in self.objects:
                name += "_"
            self.by_path[path] = name
            self.objects[name] = value
        return self.by_path[path]


class _Writer:
    """A runnable graph under construction: the copy of each node, and the region of the last copy."""

    def __init__(
        self,
        recording: Recording,
        nodes: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        outputs: Sequence[Any],
        device: torch.device | None,
        depth: int | None,
    ):
        self.recording, self.nodes, self.outputs, self.device, self.depth = recording, nodes, outputs, device, depth
        self.graph, self.names = fx.Graph(), _Names()
        self.new: dict[fx.Node, fx.Node] = {}
        self.region: tuple[bool, Any, Any] = (True, (), ())
        self.opened: list[tuple[Any, fx.Node]] = []
        self.regions = False
        for node in inputs:
            self._is(node, self.graph.placeholder(node.name))

    def take_sizes(self, sizes: Mapping[fx.Node, tuple[fx.Node, int]]) -> None:
        """Write numbers as sizes of inputs."""
        for node in self.nodes:
            if node in sizes:
                tensor, dim = sizes[node]
                self._is(node, self.graph.call_method("size", (self.new[tensor], dim)))

    def write(self, node: fx.Node) -> None:
        """Copy one op, inside the gradient mode, autocast and other settings of its recording."""
        if node.op == "call_module" or op_of(node).computes:
            op = op_of(node)
            self._switch((op.grad_mode, op.autocast, op.switches))
        for source in node.all_input_nodes:
            self._value(source)
        if op_of(node).random:
            outside = node.op == "call_module" or hasattr(node.target, "stable_name")
            self.graph.call_function(before_draw, (number_of(node.name), outside))
        made = self.graph.node_copy(node, self._value)
        if node.op == "call_module":
            made.target = self.names.add(str(node.target), resolve(self.recording.root, str(node.target)))
        if self.device is not None:
            place = partial(_placed, self.recording.device, self.device)
            made.args, made.kwargs = map_aggregate(made.args, place), map_aggregate(made.kwargs, place)
        self._is(node, made)

    def recompute(self, region: int, members: list[fx.Node]) -> None:
        """Put the ops of a region of activation checkpointing into a module of their own, which backward runs again."""
        assert self.depth is not None
        inside, outside = set(members), set(self.nodes).difference(members)
        sources = dict.fromkeys(s for n in members for s in n.all_input_nodes if s.op != "get_attr" and s not in inside)
        returned = {out for out in self.outputs if isinstance(out, fx.Node)}
        results = [node for node in members if node in returned or not outside.isdisjoint(node.users)]
        body = executable(self.recording, members, list(sources), results, self.device, depth=self.depth + 1)
        call = Recomputed(body, self.recording.checkpoints[region], body._regions)
        self._switch((True, (), ()))
        reference = self._reference(self.names.add(f"checkpoint_{region}_{members[0].name}", call))
        made = self.graph.call_function(call_object, (reference, *(self.new[source] for source in sources)))
        for i, node in enumerate(results):
            self._is(node, self.graph.call_function(operator.getitem, (made, i)))

    def finish(self) -> RecordedGraph:
        """Return the graph with its outputs, as a module."""
        self._switch((True, (), ()))
        self.graph.output(tuple(self._value(out) if isinstance(out, fx.Node) else out for out in self.outputs))
        used = used_tensors(self.recording, self.nodes)
        return RecordedGraph(self.recording.root, self.graph, self.names.objects, used, self.regions)

    def _is(self, node: fx.Node, made: fx.Node) -> None:
        made.meta = {**node.meta, "origin": node.name}
        self.new[node] = made

    def _reference(self, target: str, name: str | None = None) -> fx.Node:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.graph.create_node("get_attr", target, (), {}, name)

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self.new:
            assert node.op == "get_attr", node
            made = self._reference(self._attribute(str(node.target)), node.name)
            made.meta = dict(node.meta)
            self.new[node] = made
        return self.new[node]

    def _attribute(self, path: str) -> str:
        """Return the path of a parameter, buffer, flag, constant or module in the module that is made."""
        root = self.recording.root
        if path in self.recording.constants:
            return self.names.add(path, self._constant(self.recording.constants[path]))
        if isinstance(resolve(root, path), nn.Module):
            return self.names.add(path, resolve(root, path))
        owner, _, name = path.rpartition(".")
        return f"{self.names.add(owner, resolve(root, owner))}.{name}"

    def _constant(self, value: Any) -> Any:
        """Return a constant on the device of this graph, if the recording had it on the device of the example."""
        if self.device is None or not isinstance(value, torch.Tensor) or value.device != self.recording.device:
            return value
        return value.to(self.device)

    def _switch(self, wanted: tuple[bool, Any, Any]) -> None:
        """Close the open region, and open the region of the next op, if the two differ."""
        if wanted == self.region:
            return
        for leave, state in reversed(self.opened):
            self.graph.call_function(leave, (state,))
        self.opened.clear()
        if wanted[1]:
            self.opened.append((_leave_autocast, self.graph.call_function(_enter_autocast, (tuple(wanted[1]),))))
        if wanted[2]:
            self.opened.append((set_switches, self.graph.call_function(set_switches, (tuple(wanted[2]),))))
        if not wanted[0]:
            self.opened.append((_leave_no_grad, self.graph.call_function(_enter_no_grad, ())))
        self.region, self.regions = wanted, True


def _enter_no_grad() -> bool:
    """Switch gradients off; returns the mode before."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    return before


def _leave_no_grad(before: bool) -> None:
    torch._C._set_grad_enabled(before)


def _enter_autocast(state: tuple[Any, ...]) -> list[Any]:
    """Switch to the autocast settings of the recorded ops."""
    entered = []
    for device, dtype in [(kind, None) for kind in usable_autocast()] if state == ("off",) else state:
        if device not in usable_autocast():
            continue
        context: Any = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
        context.__enter__()
        entered.append(context)
    return entered


def _leave_autocast(entered: list[Any]) -> None:
    for context in reversed(entered):
        context.__exit__(None, None, None)


def _placed(recorded: torch.device, device: torch.device, leaf: Any) -> Any:
    return device if isinstance(leaf, torch.device) and leaf == recorded else leaf
