"""The graph under construction: which tensor belongs to which node, and how arguments are written down."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.nn.utils.rnn import PackedSequence

from pipepart.recording.trace import intrinsics, symbols
from pipepart.recording.trace.activation_checkpoints import Checkpoint
from pipepart.recording.trace.caches import CachedFunction
from pipepart.recording.trace.contexts import switches
from pipepart.recording.trace.facts import Fact, autocast_state, storage_of, user_line
from pipepart.recording.trace.failures import NotRecordable
from pipepart.recording.trace.naming import nameable
from pipepart.recording.trace.number_recorder import NumberRecorder

__all__ = ["GraphRecorder", "unseen"]

_ATOMS = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Our own bookkeeping touches tensors too: it must not be recorded."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


class GraphRecorder(NumberRecorder):
    """Makes nodes for tensors, parameters, constants and nested arguments."""

    def __init__(self, root: nn.Module, names: Any):
        self.root = root
        self.graph = fx.Graph()
        self.facts: dict[fx.Node, Fact] = {}
        self.values: dict[int, fx.Node] = {}
        self.kept: list[Any] = []
        self.module_names: dict[int, str] = names.modules
        self.tensor_names: dict[int, str] = names.tensors
        self.stack: list[tuple[str, nn.Module]] = [("", root)]
        self.attributes: dict[str, fx.Node] = {}
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[int, str] = {}
        self.outer_autocast, self.outer_switches = autocast_state(), switches()
        self.checkpoints: list[Checkpoint] = []
        self.open_checkpoints: list[int] = []
        self.mutations: dict[Any, fx.Node] = {}  # the last op that changed a storage in place
        self.trace: Any = None  # sees every value, if the run is to be compared op by op
        self.known: dict[int, fx.Node] = {}  # the nodes of the tensors that the call which is being recorded takes
        self.numbers: list[symbols.Tracked] = []  # all that were made: they are plain once the run is over
        self.cached: dict[Any, list[CachedFunction]] = {}
        self.current: dict[int, fx.Node | None] = {}  # up to which mutation the node of a tensor stands for it

    def release(self) -> None:
        """Let go of all tensors: the run is over, and only what was written down is needed."""
        symbols.finish(self.numbers)
        self.kept.clear()
        self.values.clear()
        for fact in self.facts.values():
            fact.tensor = None

    @contextmanager
    def checkpointed(self, region: Checkpoint) -> Iterator[None]:
        """Ops that are recorded inside belong to a region of activation checkpointing."""
        self.checkpoints.append(region)
        self.open_checkpoints.append(len(self.checkpoints) - 1)
        try:
            yield
        finally:
            self.open_checkpoints.pop()

    # ---------------------------------------------------------------- nodes

    def make(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None
    ) -> fx.Node:
        """A new node at the end of the graph, with what is known of where it was made."""
        if op == "call_function" and not isinstance(target, str):
            target = nameable(target)
        node = self.graph.create_node(op, target, (), {}, name)
        node.args = args  # set afterwards: fx walks arguments that are given at once a second time
        if kwargs:
            node.kwargs = kwargs
        path, module = self.stack[-1]
        autocast = autocast_state()
        self.facts[node] = Fact(
            path,
            type(module).__name__,
            user_line(),
            grad_mode=torch.is_grad_enabled(),
            autocast=autocast if autocast != self.outer_autocast else (),
            checkpoint=tuple(self.open_checkpoints),
        )
        now = switches()
        if now != self.outer_switches:
            self.facts[node].switches = now
        if autocast != self.outer_autocast and not autocast:
            self.facts[node].autocast = ("off",)
        return node

    def read_attribute(self, name: str) -> fx.Node:
        """The node that reads a parameter, buffer, constant or flag of the root by its full name."""
        if name not in self.attributes:
            node = self.graph.create_node("get_attr", name, (), {}, name.replace(".", "_"))
            self.facts[node] = Fact(self.stack[-1][0], type(self.stack[-1][1]).__name__)
            self.attributes[name] = node
        return self.attributes[name]

    def constant(self, value: Any) -> fx.Node:
        """The node that reads an object which belongs to no module."""
        name = self.constant_names.get(id(value))
        if name is None:
            name = f"_constant{len(self.constants)}"
            self.constants[name] = value
            self.constant_names[id(value)] = name
            self.kept.append(value)
        return self.read_attribute(name)

    @unseen
    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """From now on `tensor` is the value of `node`."""
        self._bind(tensor, node)

    def _bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.values[id(tensor)] = node
        self.kept.append(tensor)
        fact = self.facts[node]
        fact.tensor = tensor
        fact.shape, fact.dtype, fact.requires_grad = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        fact.nbytes = tensor.numel() * tensor.element_size()
        storage = storage_of(tensor)
        fact.writes.add(storage)
        self.current[id(tensor)] = self.mutations.get(storage)
        if self.trace is not None:
            self.trace.see(node.name, tensor)

    def _after_mutation(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        """The node of a tensor whose memory an op has changed since: it depends on that op."""
        storage = storage_of(tensor)
        mutation = self.mutations.get(storage)
        if mutation is None or self.current.get(id(tensor)) is mutation or mutation is node:
            return node
        made = self.make("call_function", intrinsics.changed, (node, mutation), {})
        fact = self.facts[made]
        fact.varies = self.facts[node].varies or self.facts[mutation].varies
        fact.dynamic = self.facts[node].dynamic
        fact.reads = {storage}
        fact.differentiates = {node, mutation}
        self._bind(tensor, made)
        return made

    @unseen
    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value `tensor` is; parameters, buffers and constants are read where they are first used."""
        return self._node_of(tensor)

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        node = self.values.get(id(tensor))
        if node is not None:
            return self._after_mutation(tensor, node)
        name = self.tensor_names.get(id(tensor))
        if name is not None:
            node = self.read_attribute(name)
            self.facts[node].varies = True
        else:
            if tensor.grad_fn is not None or (tensor.requires_grad and isinstance(tensor, nn.Parameter)):
                what = (
                    "a parameter that the module does not register"
                    if tensor.grad_fn is None
                    else (f"a result of {tensor.grad_fn.name()} that was computed outside the recorded ops")
                )
                raise NotRecordable(
                    f"a tensor of shape {tuple(tensor.shape)} is {what} "
                    f"(in module {self.stack[-1][0]!r} at {user_line()})"
                )
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise NotRecordable(
                    f"a tensor inside torch.func (vmap, grad) in module {self.stack[-1][0]!r} at {user_line()}"
                )
            node = self.constant(tensor)
        before = self.mutations.get(storage_of(tensor))
        self._bind(tensor, node)
        if before is not None:
            self.current[id(tensor)] = None
            return self._after_mutation(tensor, node)
        return node

    # ---------------------------------------------------------------- arguments

    def argument(self, value: Any) -> Any:
        """A Python argument as fx sees it: nodes for tensors and tracked numbers, constants for the rest."""
        if type(value) in _ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self.known.get(id(value)) or self.node_of(value)
        if isinstance(value, symbols.Tracked):
            return value.node() if value.owner is self and self.recording else symbols.plain(value)
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
        if type(value) is list:
            return [self.argument(item) for item in value]
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if type(value) is range:
            return [self.argument(item) for item in value]
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()
        if value is None or value is Ellipsis or isinstance(value, _PLAIN):
            return value
        if isinstance(value, nn.Module) and id(value) in self.module_names:
            return self.read_attribute(self.module_names[id(value)])
        if id(value) in self.values:
            return self.values[id(value)]
        return self.constant(value)
