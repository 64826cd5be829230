"""Python numbers of a recorded run: sizes and items of tensors, and branches of Python code that depend on them."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.recorded_run import intrinsics, symbols
from pipepart.recording.recorded_run.caches import CachedFunction, cached_in
from pipepart.recording.recorded_run.contexts import user_line
from pipepart.recording.recorded_run.failures import Converted, DataDependent, NotRecordable
from pipepart.recording.recorded_run.graph_builder import GraphBuilder
from pipepart.recording.recorded_run.tensors import tensors_in

__all__ = ["NumberRecorder"]


class NumberRecorder:
    """Makes nodes for numbers that come from tensors, and checks for branches that depend on them.

    It is the owner of the tracked numbers of a run. With `guards`, Python may branch on the contents of a tensor, and the
    graph gets a check. With `converting`, ``float(x)`` and ``int(x)`` give tracked numbers.
    """

    def __init__(self, builder: GraphBuilder, guards: bool):
        self.builder, self.guards = builder, guards
        self.converting = False
        self.graph, self.facts = builder.graph, builder.facts
        self.tracked: list[symbols.Tracked] = []
        """All tracked numbers of the run: they are plain once it is over."""
        self.cached: dict[types.CodeType, list[CachedFunction]] = {}
        """Cached functions that can be called by code that uses a tracked number as a key."""

    @property
    def recording(self) -> bool:
        return self.builder.recording

    def finish(self) -> None:
        """Make all tracked numbers plain: the run is over."""
        symbols.finish(self.tracked)

    def input(self, node: fx.Node, value: Any, of_state: bool) -> symbols.StepNumber:
        """Return the number of an input as a tracked one; `of_state`: the user's Python state holds it."""
        self.facts[node].number = value
        return symbols.StepNumber(value, self, lambda: node, of_state)

    def number_node(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        """Make the node of a Python number that is computed from other numbers."""
        sources = [self.facts[arg] for arg in args if isinstance(arg, fx.Node)]
        chance = any(source.chance for source in sources) and all(s.chance or not s.varies for s in sources)
        from_data = any(source.from_data for source in sources)
        return self._made("call_function", target, args, value, from_data, chance)

    def compared(self, op: Callable[..., Any], a: Any, b: Any, result: bool, from_data: bool) -> None:
        """Add a check for a branch on a tracked number: the graph holds only while the same branch is taken."""
        if self.builder.idle:
            return
        where = f"{op.__name__} in module {self.builder.stack[-1][0]!r} at {user_line()}"
        if from_data and not self.guards:
            raise DataDependent(f"Python branches on a number that was read from a tensor ({where})")
        left, right = (x.node() if symbols.is_tracked(x) else symbols.plain(x) for x in (a, b))
        seen = self.number_node(op, (left, right), result)
        self._check(seen, result, where, self.facts[seen].from_data)

    def hashed(self, frame: types.FrameType) -> None:
        """Note code that uses a tracked number as a key, perhaps of a cache."""
        if not self.builder.frames and frame.f_code not in self.cached:
            self.cached[frame.f_code] = cached_in(frame)

    def converted(self, number: symbols.Tracked) -> None:
        """Ask for a run in which ``float`` and ``int`` give tracked numbers, if a number from a step or from data needs it."""
        if self.converting or self.builder.idle or not symbols.is_followed(number):
            return
        raise Converted(f"Python makes a plain number of a number that changes with each step ({self.builder.here()})")

    # ---------------------------------------------------------------- sizes

    def length(self, tensor: torch.Tensor, size: int) -> Any:
        """Return ``len(tensor)`` as a tracked number."""
        return size if self.builder.idle else self._size(tensor, "size", (0,), size)

    def sizes(self, tensor: torch.Tensor, sizes: Any, method: str = "size") -> Any:
        """Return the shape or the strides of a tensor as tracked numbers."""
        tracked = [self._size(tensor, method, (dim,), size) for dim, size in enumerate(sizes)]
        return torch.Size(tracked) if method == "size" else tuple(tracked)

    def result(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Return the result of a call that gave no tensor: a tracked number if it is a size."""
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor):
            return out
        if name in ("size", "stride"):
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return self.sizes(tensor, out, name) if dim is None else self._size(tensor, name, (int(dim),), out)
        return self._size(tensor, "numel", (), out) if name in ("numel", "nelement") else out

    def _size(self, tensor: torch.Tensor, method: str, args: tuple[Any, ...], size: int) -> Any:
        node = self.builder.node_of(tensor)
        fact = self.facts[node]
        if node.op == "get_attr" or not fact.varies:
            return size
        make = partial(self._size_node, node, method, args, size)
        return symbols.track(size, self, make, fact.dynamic_shape)

    def _size_node(self, node: fx.Node, method: str, args: tuple[Any, ...], size: int) -> fx.Node:
        return self._made("call_method", method, (node, *args), size, self.facts[node].dynamic_shape, False)

    # ---------------------------------------------------------------- contents of tensors

    def read_data(self, func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
        """Record a call that turns the contents of tensors into Python values."""
        inputs = tensors_in((args, kwargs))
        nodes = [self.builder.node_of(tensor) for tensor in inputs]
        if not any(self.facts[node].varies for node in nodes):
            return func(*plain_args, **plain_kwargs)
        where = f"Tensor.{name} in {self.builder.here()}"
        fake = any(hasattr(tensor, "fake_mode") for tensor in inputs)
        if name == "item" and not fake:
            out, node = func(*plain_args, **plain_kwargs), nodes[0]
            if type(out) is bool:
                return self._specialise(node, out, where)
            make = partial(self._made, "call_method", "item", (node,), out, True, self.facts[node].chance)
            number = symbols.track(out, self, make, True)
            if isinstance(number, symbols.Tracked):
                number.tensor = inputs[0]
            return number
        if name in ("__float__", "__int__") and not fake and not self.converting:
            raise Converted(f"Python makes a plain number of a tensor ({where})")
        if len(nodes) == 1 and self.facts[nodes[0]].chance and _certain(nodes[0]):
            return _outcome(nodes[0]) if fake else func(*plain_args, **plain_kwargs)
        if not self.guards or fake:
            raise DataDependent(f"Python reads the contents of a tensor ({where})")
        out = func(*plain_args, **plain_kwargs)
        if name in ("numpy", "__array__"):
            raise DataDependent(f"a tensor is turned into a numpy array ({where})")
        if len(inputs) != 1:
            raise DataDependent(f"Python compares the contents of tensors ({where})")
        return self._specialise(nodes[0], out, where)

    def _specialise(self, node: fx.Node, value: Any, where: str) -> Any:
        if not self.guards:
            raise DataDependent(f"Python reads the contents of a tensor ({where})")
        self._check(node, value, where, True)
        return value

    def fix_pieces(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Fix the number of pieces of a tensor whose shape depends on data, with a check: the graph uses as many as there were.

        A list of sizes says itself how many there are.
        """
        tensor, position = args[0], 1 if name == "unbind" else 2
        sizes = None if name == "unbind" else args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
        if isinstance(sizes, (list, tuple)):
            return
        where = f"{name} of a tensor whose shape depends on data, in {self.builder.here()}"
        if not self.guards:
            raise DataDependent(where)
        dim = symbols.plain(args[position] if len(args) > position else kwargs.get("dim", 0))
        with torch._C.DisableTorchFunction():
            size = int(tensor.shape[dim])
        node = self._size_node(self.builder.node_of(tensor), "size", (dim,), size)
        self._check(node, size, where, True)

    # ---------------------------------------------------------------- nodes

    def _made(self, op: str, target: Any, args: tuple[Any, ...], value: Any, from_data: bool, chance: bool) -> fx.Node:
        node = self.builder.make(op, target, args, {})
        fact = self.facts[node]
        fact.number, fact.varies, fact.from_data, fact.chance = value, True, from_data, chance
        return node

    def _check(self, node: fx.Node, value: Any, where: str, from_data: bool) -> None:
        """Add a check that a node has this value. A random value is refused, unless only one outcome is possible."""
        if self.facts[node].chance:
            if _certain(node):
                return
            raise NotRecordable(
                f"Python branches on a random number ({where}): draw it in a hook, and read it in the step from an "
                "attribute; for LayerDrop of a library: set its rate to 0 (layerdrop=0.0)"
            )
        guard = self.builder.make("call_function", intrinsics.check, (node, value, where), {})
        self.facts[guard].from_data = from_data


def _certain(comparison: fx.Node) -> bool:
    """Return whether a comparison of a uniform random number has one outcome only (a rate of 0 or 1)."""
    limits: list[Any] = [arg for arg in comparison.args if type(arg) in (int, float)]
    return len(limits) == 1 and bool(limits[0] <= 0 or limits[0] >= 1)


def _outcome(comparison: fx.Node) -> bool:
    """Return the outcome of a certain comparison, without drawing the number."""
    name = comparison.target if isinstance(comparison.target, str) else comparison.target.__name__
    values = [arg if type(arg) in (int, float) else 0.5 for arg in comparison.args]
    return bool(getattr(operator, name.strip("_"))(*values))
