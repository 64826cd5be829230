"""The part of a recorder that follows Python numbers: sizes, items, and what Python decides by them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.recording.trace import intrinsics, symbols
from pipepart.recording.trace.arguments import tensors_in
from pipepart.recording.trace.caches import CachedFunction, cached_in
from pipepart.recording.trace.facts import Fact, user_line
from pipepart.recording.trace.failures import DataDependent, NotRecordable
from pipepart.recording.trace.naming import certain, outcome

__all__ = ["NumberRecorder"]


class NumberRecorder:
    """Makes nodes for numbers that come from tensors, and checks for decisions that hang on them."""

    facts: dict[fx.Node, Fact]
    stack: list[tuple[str, nn.Module]]
    frames: list[Any]
    recording: bool
    guards: bool
    numbers: list[symbols.Tracked]
    cached: dict[types.CodeType, list[CachedFunction]]
    """The cached functions that code which used a tracked number as a key can call."""

    def make(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        raise NotImplementedError

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        raise NotImplementedError

    def here(self) -> str:
        """Module and line of the user's code that is running."""
        return f"module {self.stack[-1][0]!r} ({type(self.stack[-1][1]).__name__}) at {user_line()}"

    def number_node(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        """A node for a Python number computed from other numbers."""
        node = self.make("call_function", target, args, {})
        fact = self.facts[node]
        fact.number, fact.varies = value, True
        sources = [self.facts[arg] for arg in args if isinstance(arg, fx.Node)]
        fact.chance = any(source.chance for source in sources) and all(s.chance or not s.varies for s in sources)
        fact.from_data = any(self.facts[arg].from_data for arg in args if isinstance(arg, fx.Node))
        return node

    def compared(self, op: Callable[..., Any], a: Any, b: Any, result: bool, from_data: bool) -> None:
        """Python looked at a tracked number: the graph holds only while it would see the same."""
        if self.frames or not self.recording:
            return
        where = f"{op.__name__} in module {self.stack[-1][0]!r} at {user_line()}"
        if from_data and not self.guards:
            raise DataDependent(f"a Python decision on a number that was read from a tensor ({where})")
        left, right = (x.node() if symbols.is_tracked(x) else symbols.plain(x) for x in (a, b))
        seen = self.number_node(op, (left, right), result)
        if self.facts[seen].chance:
            if certain(seen):
                return
            raise NotRecordable(
                f"Python decides by a random number ({where}); e.g. LayerDrop: set its rate to 0 (layerdrop=0.0)"
            )
        guard = self.make("call_function", intrinsics.check, (seen, result, where), {})
        self.facts[guard].from_data = self.facts[seen].from_data

    def hashed(self, frame: types.FrameType) -> None:
        """Code uses a tracked number as a key, perhaps of a cache."""
        if not self.frames and frame.f_code not in self.cached:
            self.cached[frame.f_code] = cached_in(frame)

    def _sizes(self, tensor: torch.Tensor, sizes: Any, method: str) -> Any:
        wrapped = [self._size(tensor, dim, size, method) for dim, size in enumerate(sizes)]
        return torch.Size(wrapped) if method == "size" else tuple(wrapped)

    def _size(self, tensor: torch.Tensor, dim: int, size: int, method: str = "size") -> Any:
        node = self.node_of(tensor)
        if node.op == "get_attr" or not self.facts[node].varies:
            return size
        return symbols.track(size, self, lambda: self._size_node(node, method, (dim,), size), self.facts[node].dynamic)

    def _size_node(self, node: fx.Node, method: str, args: tuple[Any, ...], value: int) -> fx.Node:
        made = self.make("call_method", method, (node, *args), {})
        fact = self.facts[made]
        fact.number, fact.varies, fact.from_data = value, True, self.facts[node].dynamic
        return made

    def length(self, tensor: torch.Tensor, size: int) -> Any:
        """``len(tensor)`` as a tracked number."""
        return self._size(tensor, 0, size) if self.recording and not self.frames else size

    def _number(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is None:
            return out
        if name in ("size", "stride"):
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if dim is None:
                return self._sizes(tensor, out, name)
            return self._size(tensor, int(dim), out, name)
        if name in ("numel", "nelement"):
            node = self.node_of(tensor)
            if node.op == "get_attr" or not self.facts[node].varies:
                return out
            return symbols.track(out, self, lambda: self._size_node(node, "numel", (), out), self.facts[node].dynamic)
        return out

    def _read_data(self, func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        nodes = [self.node_of(tensor) for tensor in inputs]
        if not any(self.facts[node].varies for node in nodes):
            return func(*plain_args, **plain_kwargs)
        where = f"Tensor.{name} in {self.here()}"
        fake = any(hasattr(tensor, "fake_mode") for tensor in inputs)
        if name == "item" and not fake:
            out, node = func(*plain_args, **plain_kwargs), nodes[0]
            return (
                symbols.track(out, self, lambda: self._item_node(node, out), True)
                if type(out) is not bool
                else (self._specialise(node, out, where))
            )
        if len(nodes) == 1 and self.facts[nodes[0]].chance and certain(nodes[0]):
            return outcome(nodes[0]) if fake else func(*plain_args, **plain_kwargs)
        if not self.guards or fake:
            raise DataDependent(f"Python reads the contents of a tensor ({where})")
        out = func(*plain_args, **plain_kwargs)
        if name in ("numpy", "__array__"):
            raise DataDependent(f"a tensor is turned into a numpy array ({where})")
        if len(inputs) != 1:
            raise DataDependent(f"Python compares the contents of tensors ({where})")
        return self._specialise(nodes[0], out, where)

    def _item_node(self, node: fx.Node, value: Any) -> fx.Node:
        made = self.make("call_method", "item", (node,), {})
        fact = self.facts[made]
        fact.number, fact.varies, fact.from_data, fact.chance = value, True, True, self.facts[node].chance
        return made

    def _specialise(self, node: fx.Node, value: Any, where: str) -> Any:
        if not self.guards:
            raise DataDependent(f"Python reads the contents of a tensor ({where})")
        if self.facts[node].chance:
            if certain(node):
                return value
            raise NotRecordable(
                f"Python decides by a random number ({where}); e.g. LayerDrop: set its rate to 0 (layerdrop=0.0)"
            )
        guard = self.make("call_function", intrinsics.check, (node, value, where), {})
        self.facts[guard].from_data = True
        return value
