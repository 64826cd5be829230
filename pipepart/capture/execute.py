"""Recorded nodes as runnable modules that read everything from the user's own modules.

Nothing is copied or registered: a runnable graph holds plain references to the leaf modules it calls and to the modules
whose parameters, buffers and ``training`` flags it reads. So a parameter that is replaced (moved, materialised) and
``root.eval()`` are seen at once, and one dictionary lookup finds a leaf.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.capture.intrinsics import set_attribute

if TYPE_CHECKING:
    from pipepart.capture.recording import Recording

__all__ = ["RecordedGraph", "RecordedModule", "executable", "tensor_names", "used_tensors"]


class RecordedGraph(fx.GraphModule):
    """A runnable part of a recording; its parameters are those of the root, under their full names."""

    _root: Any
    _used: Any
    _regions: bool

    def __init__(
        self, root: nn.Module, graph: fx.Graph, references: Mapping[str, Any], used: Sequence[str], regions: bool
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(nn.Module(), fx.Graph(), type(root).__name__)
        self.__dict__["_root"] = root
        self.__dict__["_used"] = tuple(used)
        self.__dict__["_regions"] = regions
        self.__dict__.update(references)
        self.training = root.training
        self.graph = graph

    def __call__(self, *args: Any) -> Any:
        if not self._regions:
            return self.forward(*args)
        with ExitStack() as stack:  # an exception inside a region must not leave its grad mode or autocast behind
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.callback(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
            return self.forward(*args)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._root.named_parameters(remove_duplicate=remove_duplicate):
            if name in self._used:
                yield f"{prefix}{'.' if prefix else ''}{name}", parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in self._root.named_buffers(remove_duplicate=remove_duplicate):
            if name in self._used:
                yield f"{prefix}{'.' if prefix else ''}{name}", buffer

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What this part uses of the root's state, under the full names."""
        return {name: value for name, value in self._root.state_dict().items() if name in self._used}

    def train(self, mode: bool = True) -> RecordedGraph:
        """Switch the root: a recording has no mode of its own."""
        self._root.train(mode)
        self.training = mode
        return self


class RecordedModule(nn.Module):
    """A recording that is called like the original module or step."""

    def __init__(self, recording: Recording):
        super().__init__()
        self.__dict__["recording"] = recording
        self.__dict__["body"] = executable(recording)
        self.training = recording.root.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recording = self.__dict__["recording"]
        return recording.unflatten(self.__dict__["body"](*recording.flatten(args, kwargs)))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["recording"].root.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["recording"].root.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["recording"].root.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["recording"].root.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> RecordedModule:
        self.__dict__["recording"].root.train(mode)
        self.training = mode
        return self


def tensor_names(root: nn.Module) -> dict[int, str]:
    """The first name in the root of each parameter and buffer, by identity, in order."""
    canonical: dict[int, str] = {}
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        canonical.setdefault(id(tensor), name)
    return canonical


def used_tensors(
    recording: Recording, nodes: Sequence[fx.Node], canonical: Mapping[int, str] | None = None
) -> list[str]:
    """Full names of the parameters and buffers that these nodes use, each by its first name in the root."""
    root = recording.root
    canonical = canonical if canonical is not None else tensor_names(root)
    found: dict[str, None] = {}
    for node in nodes:
        sources = [node] if node.op == "call_module" else []
        sources += [source for source in node.all_input_nodes if source.op == "get_attr"]
        for source in sources:
            path = str(source.target)
            if path in recording.constants:
                continue
            value = resolve(root, path)
            if node.target is set_attribute and isinstance(value, nn.Module):
                continue
            tensors = [value] if isinstance(value, torch.Tensor) else []
            if isinstance(value, nn.Module):
                tensors = [*value.parameters(), *value.buffers()]
            for tensor in tensors:
                name = canonical.get(id(tensor))
                if name is not None:
                    found[name] = None
    if len(found) < 2:
        return list(found)
    order = {name: i for i, name in enumerate(canonical.values())}
    return sorted(found, key=order.__getitem__)


def resolve(root: nn.Module, path: str) -> Any:
    """The attribute of the root with this dotted name."""
    value: Any = root
    for part in path.split(".") if path else []:
        value = getattr(value, part)
    return value


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


def _enter_no_grad() -> bool:
    """Switch gradients off; returns what was on."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    return before


def _leave_no_grad(before: bool) -> None:
    torch._C._set_grad_enabled(before)


def _enter_autocast(state: tuple[Any, ...]) -> list[Any]:
    """Switch to the autocast settings that were on when the ops were recorded."""
    entered = []
    if state == ("off",):
        pairs = [("cpu", None), ("cuda", None)]
    else:
        pairs = list(state)
    for device, dtype in pairs:
        if device == "cuda" and not torch.cuda.is_available():
            continue
        context: Any = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
        context.__enter__()
        entered.append(context)
    return entered


def _leave_autocast(entered: list[Any]) -> None:
    for context in reversed(entered):
        context.__exit__(None, None, None)


def executable(
    recording: Recording,
    nodes: Sequence[fx.Node] | None = None,
    inputs: Sequence[fx.Node] | None = None,
    outputs: Sequence[Any] | None = None,
    device: torch.device | None = None,
    sizes: Mapping[fx.Node, tuple[fx.Node, int]] | None = None,
) -> RecordedGraph:
    """These nodes of a recording (all of them by default) as a module: values of `inputs` to values of `outputs`.

    With `device`, tensors that the model made on the device of the example are made there instead. `sizes` are numbers
    to be taken from a dimension of an input instead of from where the recording takes them.
    """
    everything = list(recording.graph.nodes)
    if nodes is None:
        nodes = [node for node in everything if node.op not in ("placeholder", "output", "get_attr")]
    if inputs is None:
        inputs = [node for node in everything if node.op == "placeholder"]
    if outputs is None:
        outputs = everything[-1].args[0]
    assert outputs is not None
    graph, names = fx.Graph(), _Names()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta = {**node.meta, "origin": node.name}
    root = recording.root

    def attribute(node: fx.Node) -> fx.Node:
        path = str(node.target)
        if path in recording.constants:
            target = names.add(path, recording.constants[path])
        else:
            owner, _, name = path.rpartition(".")
            if isinstance(resolve(root, path), nn.Module):
                target = names.add(path, resolve(root, path))
            else:
                target = f"{names.add(owner, resolve(root, owner))}.{name}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = graph.create_node("get_attr", target, (), {}, node.name)
        made.meta = dict(node.meta)
        return made

    def value(node: fx.Node) -> fx.Node:
        if node not in new:
            assert node.op == "get_attr", node
            new[node] = attribute(node)
        return new[node]

    region: tuple[bool, Any] = (True, ())
    opened: list[tuple[Any, fx.Node]] = []
    regions = False

    def switch(wanted: tuple[bool, Any]) -> None:
        nonlocal region, regions
        if wanted == region:
            return
        for leave, state in reversed(opened):
            graph.call_function(leave, (state,))
        opened.clear()
        if wanted[1]:
            opened.append((_leave_autocast, graph.call_function(_enter_autocast, (_quote(wanted[1]),))))
        if not wanted[0]:
            opened.append((_leave_no_grad, graph.call_function(_enter_no_grad, ())))
        region, regions = wanted, True

    for node in nodes:
        if node.op == "call_module" or node.meta.get("computes", True):
            switch((node.meta.get("grad_mode", True), node.meta.get("autocast", ())))
        if sizes is not None and node in sizes:
            tensor, dim = sizes[node]
            new[node] = graph.call_method("size", (new[tensor], dim))
            new[node].meta = {**node.meta, "origin": node.name}
            continue
        for source in node.all_input_nodes:
            value(source)
        made = graph.node_copy(node, value)
        if node.op == "call_module":
            made.target = names.add(str(node.target), resolve(root, str(node.target)))
        if device is not None:
            made.args, made.kwargs = _move(made.args, device), _move(made.kwargs, device)
        made.meta["origin"] = node.name
        new[node] = made
    switch((True, ()))
    graph.output(tuple(value(out) if isinstance(out, fx.Node) else out for out in outputs))
    return RecordedGraph(root, graph, names.objects, used_tensors(recording, nodes), regions)


def _quote(state: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(state)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.device):
        return device
    if isinstance(value, tuple):
        return tuple(_move(item, device) for item in value)
    if isinstance(value, list):
        return [_move(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    return value
