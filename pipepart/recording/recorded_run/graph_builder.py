"""The graph under construction: the node of each tensor, and the form of arguments in the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.nn.utils.rnn import PackedSequence

from pipepart.recording.recorded_run import intrinsics, moments, symbols
from pipepart.recording.recorded_run.contexts import Checkpoint, autocast_state, switches, user_line
from pipepart.recording.recorded_run.facts import Fact
from pipepart.recording.recorded_run.failures import NotRecordable
from pipepart.recording.recorded_run.ops import nameable
from pipepart.recording.recorded_run.tensors import storage_of

__all__ = ["Frame", "GraphBuilder", "unseen"]

_ATOMS = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the recorder's own use of tensors out of the recording."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


@dataclass
class Frame:
    """A call that is run whole, and the tensors that it may use."""

    tensors: set[int]
    """Identities of its arguments."""
    prefix: str | None
    """Path of the module whose parameters and buffers it may use."""
    borrowed: dict[str, torch.Tensor] | None = None
    """Parameters and buffers that it uses without owning them; None if it may not."""


class GraphBuilder:
    """Makes nodes for tensors, parameters, constants and nested arguments, each with notes on its origin."""

    def __init__(self, root: nn.Module, names: Any):
        self.root = root
        self.graph = fx.Graph()
        self.recording = True
        self.facts: dict[fx.Node, Fact] = {}
        self.values: dict[int, fx.Node] = {}  # nodes of tensors and other results, by identity
        self.kept: list[Any] = []  # values whose identities are keys: they must not be freed during the run
        self.module_names: dict[int, str] = names.modules
        self.tensor_names: dict[int, str] = names.tensors
        self.stack: list[tuple[str, nn.Module]] = [("", root)]  # modules that are running, the innermost last
        self.frames: list[Frame] = []  # calls that are being run whole, the innermost last
        self.attributes: dict[str, fx.Node] = {}
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[int, str] = {}
        self.outer_autocast, self.outer_switches = autocast_state(), switches()
        self.checkpoints: list[Checkpoint] = []
        self.open_checkpoints: list[int] = []
        self.mutations: dict[Any, fx.Node] = {}  # the last op that changed each storage in place
        self.current: dict[int, fx.Node | None] = {}  # the last mutation that the node of each tensor includes
        self.known: dict[int, fx.Node] = {}  # nodes of the arguments of the call that is being recorded
        self.seen: Any = None  # sees every value, if the run is compared op by op

    @property
    def idle(self) -> bool:
        """Whether calls are run without being recorded: the run is over, or inside a call that is kept whole."""
        return not self.recording or bool(self.frames)

    def here(self) -> str:
        """Return the module and the line of the user's code that is running, in words."""
        path, module = self.stack[-1]
        return f"module {path!r} ({type(module).__name__}) at {user_line()}"

    @contextmanager
    def inside(self, path: str, module: nn.Module) -> Iterator[None]:
        """Record ops as those of `module`."""
        self.stack.append((path, module))
        try:
            yield
        finally:
            self.stack.pop()

    @contextmanager
    def checkpointed(self, region: Checkpoint) -> Iterator[None]:
        """Record ops as those of a region of activation checkpointing."""
        self.checkpoints.append(region)
        self.open_checkpoints.append(len(self.checkpoints) - 1)
        try:
            yield
        finally:
            self.open_checkpoints.pop()

    def release(self) -> None:
        """Drop all tensors after the run: only the graph and the notes are needed."""
        self.kept.clear()
        self.values.clear()
        for fact in self.facts.values():
            fact.tensor = None

    # ---------------------------------------------------------------- nodes

    def make(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Make a node at the end of the graph, with notes on its origin and context."""
        if op == "call_function":
            target = nameable(target)
        node = self.graph.create_node(op, target, (), {})
        node.args = args  # set afterwards, because fx would walk arguments of `create_node` twice
        if kwargs:
            node.kwargs = kwargs
        path, module = self.stack[-1]
        fact = self.facts[node] = Fact(
            path,
            type(module).__name__,
            user_line(),
            grad_mode=torch.is_grad_enabled(),
            checkpoint=tuple(self.open_checkpoints),
            moment=moments.now(),
        )
        autocast, now = autocast_state(), switches()
        if autocast != self.outer_autocast:
            fact.autocast = autocast or ("off",)
        if now != self.outer_switches:
            fact.switches = now
        return node

    def placeholder(self, name: str, varies: bool) -> fx.Node:
        """Make the node of an input."""
        node = self.graph.placeholder(name)
        self.facts[node] = Fact(varies=varies)
        return node

    def output(self, values: tuple[Any, ...]) -> None:
        """Make the node of the results."""
        self.facts[self.graph.output(values)] = Fact()

    def read_attribute(self, name: str) -> fx.Node:
        """Return the node that reads a parameter, buffer, constant or flag of the root by its full name."""
        if name not in self.attributes:
            node = self.graph.create_node("get_attr", name, (), {}, name.replace(".", "_"))
            self.facts[node] = Fact(self.stack[-1][0], type(self.stack[-1][1]).__name__)
            self.attributes[name] = node
        return self.attributes[name]

    def constant(self, value: Any) -> fx.Node:
        """Return the node that reads an object which belongs to no module."""
        name = self.constant_names.get(id(value))
        if name is None:
            name = f"_constant{len(self.constants)}"
            self.constants[name] = value
            self.constant_names[id(value)] = name
            self.kept.append(value)
        return self.read_attribute(name)

    # ---------------------------------------------------------------- tensors

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Make `tensor` the value of `node` from now on. To be called where torch functions are not recorded."""
        self.values[id(tensor)] = node
        self.kept.append(tensor)
        fact = self.facts[node]
        fact.tensor = tensor
        fact.shape, fact.dtype, fact.requires_grad = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        fact.output_bytes = tensor.numel() * tensor.element_size()
        storage = storage_of(tensor)
        fact.writes.add(storage)
        self.current[id(tensor)] = self.mutations.get(storage)
        if self.seen is not None:
            self.seen.see(node.name, tensor)

    @unseen
    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node whose value `tensor` is; parameters, buffers and constants are read at their first use."""
        return self.find(tensor)

    def find(self, tensor: torch.Tensor) -> fx.Node:
        """Do the same as `node_of`, where torch functions are not recorded."""
        node = self.values.get(id(tensor))
        if node is not None:
            return self._after_mutation(tensor, node)
        name = self.tensor_names.get(id(tensor))
        if name is not None:
            node = self.read_attribute(name)
            self.facts[node].varies = True
        else:
            self._check_foreign(tensor)
            node = self.constant(tensor)
        before = self.mutations.get(storage_of(tensor))
        self.bind(tensor, node)
        if before is not None:
            self.current[id(tensor)] = None
            return self._after_mutation(tensor, node)
        return node

    def _check_foreign(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that is neither recorded nor a constant."""
        where = f"module {self.stack[-1][0]!r} at {user_line()}"
        shape = tuple(tensor.shape)
        if tensor.grad_fn is not None:
            what = f"a result of {tensor.grad_fn.name()} that was computed outside the recorded ops"
            raise NotRecordable(f"a tensor of shape {shape} is {what} (in {where})")
        if tensor.requires_grad and isinstance(tensor, nn.Parameter):
            raise NotRecordable(
                f"a tensor of shape {shape} is a parameter that the module does not register (in {where})"
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise NotRecordable(f"a tensor of a torch.func transform (vmap, grad) is used in {where}")

    def _after_mutation(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        """Return the node of a tensor; if an op has changed its memory since, a new one that depends on that op."""
        storage = storage_of(tensor)
        mutation = self.mutations.get(storage)
        if mutation is None or self.current.get(id(tensor)) is mutation or mutation is node:
            return node
        made = self.make("call_function", intrinsics.changed, (node, mutation), {})
        fact = self.facts[made]
        fact.varies = self.facts[node].varies or self.facts[mutation].varies
        fact.dynamic_shape = self.facts[node].dynamic_shape
        fact.reads = {storage}
        fact.differentiates = {node, mutation}
        self.bind(tensor, made)
        return made

    # ---------------------------------------------------------------- arguments

    def argument(self, value: Any) -> Any:
        """Return a Python argument in the form of fx: nodes for tensors and tracked numbers, constants for objects."""
        if type(value) in _ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self.known.get(id(value)) or self.node_of(value)
        if isinstance(value, symbols.Tracked):
            own = self.recording and value.owner is not None and value.owner.graph is self.graph
            return value.node() if own else symbols.plain(value)
        if isinstance(value, PackedSequence):
            parts = tuple(self.argument(part) for part in value)
            node = self.make("call_function", PackedSequence, parts, {})
            self.facts[node].varies = True
            self.facts[node].differentiates = {part for part in node.all_input_nodes if self.facts[part].requires_grad}
            return node
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.argument(item) for item in value))
        if isinstance(value, tuple):
            return tuple(self.argument(item) for item in value)
        if isinstance(value, (list, range)):
            return [self.argument(item) for item in value]
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()
        if value is Ellipsis or isinstance(value, _PLAIN):
            return value
        if isinstance(value, nn.Module) and id(value) in self.module_names:
            return self.read_attribute(self.module_names[id(value)])
        if id(value) in self.values:
            return self.values[id(value)]
        return self.constant(value)
