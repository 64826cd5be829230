"""Numbers that remember where they came from, so that sizes and step counters stay dynamic in a recorded graph.

A size (``x.shape[0]``) must be a real `int` for PyTorch and for user code, so it is a subclass of `int` that can make an
fx node of itself when it is used. A step counter is no `int` at all: ``float * int_subclass`` would bypass us, and a
counter that is baked in is wrong at the next step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.fx as fx

__all__ = ["StepNumber", "TrackedFloat", "TrackedInt", "is_tracked", "plain", "track"]


class Owner(Protocol):
    """What a tracked number needs from the recorder that made it."""

    @property
    def recording(self) -> bool: ...

    def number_node(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node: ...

    def compared(self, op: Callable[..., Any], a: Any, b: Any, result: bool, from_data: bool) -> None: ...


class _Tracked:
    """State of a number: who records it, and how to make its node (made at most once, when first used)."""

    owner: Owner
    make: Callable[[], fx.Node]
    made: fx.Node | None
    from_data: bool

    def node(self) -> fx.Node:
        if self.made is None:
            self.made = self.make()
        return self.made

    def __deepcopy__(self, memo: Any) -> Any:
        return plain(self)

    def __reduce__(self) -> Any:
        return type(plain(self)), (plain(self),)


class TrackedInt(_Tracked, int):
    """An `int` that came from a tensor's size or from ``Tensor.item()``."""


class TrackedFloat(_Tracked, float):
    """A `float` computed from tracked numbers or from ``Tensor.item()``."""


class StepNumber(_Tracked):
    """A number that changes from step to step (``batch_idx``). Using its value in Python adds a guard."""

    def __init__(self, value: int | float, owner: Owner, make: Callable[[], fx.Node]):
        self.value, self.owner, self.make, self.made, self.from_data = value, owner, make, None, False

    def _concrete(self) -> Any:
        if self.owner.recording:
            self.owner.compared(operator.eq, self, self.value, True, False)
        return self.value

    def __int__(self) -> int:
        return int(self._concrete())

    def __index__(self) -> int:
        return operator.index(self._concrete())

    def __float__(self) -> float:
        return float(self._concrete())

    def __bool__(self) -> bool:
        result = bool(self.value)
        if self.owner.recording:
            self.owner.compared(operator.ne, self, 0, result, False)
        return result

    def __hash__(self) -> int:
        return hash(self._concrete())

    def __format__(self, spec: str) -> str:
        return format(self._concrete(), spec)

    def __str__(self) -> str:
        return str(self._concrete())

    __repr__ = __str__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        strip = torch.utils._pytree.tree_map_only(StepNumber, lambda number: number.value, (args, kwargs or {}))
        return func(*strip[0], **strip[1])


def is_tracked(value: Any) -> bool:
    """Whether `value` is a number that can make a node of itself."""
    return isinstance(value, _Tracked)


def plain(value: Any) -> Any:
    """The bare Python number behind a tracked one; everything else unchanged."""
    if isinstance(value, TrackedInt):
        return int.__index__(value)
    if isinstance(value, TrackedFloat):
        return float.__float__(value)
    if isinstance(value, StepNumber):
        return value.value
    return value


def track(value: Any, owner: Owner, make: Callable[[], fx.Node], from_data: bool = False) -> Any:
    """`value` as a tracked number, if it is an int or a float."""
    kind: Any = {int: TrackedInt, float: TrackedFloat}.get(type(value))
    if kind is None:
        return value
    number = kind.__new__(kind, value)
    number.owner, number.make, number.made, number.from_data = owner, make, None, from_data
    return number


def _owner_of(*numbers: Any) -> tuple[Owner, bool, bool]:
    tracked = [number for number in numbers if isinstance(number, _Tracked)]
    return (
        tracked[0].owner,
        any(number.from_data for number in tracked),
        any(isinstance(number, StepNumber) for number in tracked),
    )


def _derive(target: Callable[..., Any], *operands: Any) -> Any:
    value = target(*(plain(operand) for operand in operands))
    owner, from_data, step = _owner_of(*operands)
    if not owner.recording or not isinstance(value, (int, float)) or isinstance(value, bool):
        return value

    def make() -> fx.Node:
        args = tuple(operand.node() if isinstance(operand, _Tracked) else operand for operand in operands)
        return owner.number_node(target, args, value)

    return StepNumber(value, owner, make) if step else track(value, owner, make, from_data)


def _arithmetic(op: Callable[..., Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor) and isinstance(self, StepNumber):
            number = track(self.value, self.owner, self.node)
            return op(other, number) if reflected else op(number, other)
        if not isinstance(other, (int, float, StepNumber)):
            return NotImplemented
        return _derive(op, other, self) if reflected else _derive(op, self, other)

    return method


def _comparison(op: Callable[..., bool]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float, StepNumber)):
            return NotImplemented
        result = op(plain(self), plain(other))
        owner, from_data, _ = _owner_of(self, other)
        if owner.recording:
            owner.compared(op, self, other, result, from_data)
        return result

    return method


def _truth(self: Any) -> bool:
    result = bool(plain(self))
    if self.owner.recording:
        self.owner.compared(operator.ne, self, 0, result, self.from_data)
    return result


def _unary(target: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda self: _derive(target, self)


def _install() -> None:
    kind: Any
    base: Any
    for kind in (TrackedInt, TrackedFloat, StepNumber):
        for name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
            op = getattr(operator, name)
            setattr(kind, f"__{name}__", _arithmetic(op, False))
            setattr(kind, f"__r{name}__", _arithmetic(op, True))
        for name in ("lt", "le", "gt", "ge", "eq", "ne"):
            setattr(kind, f"__{name}__", _comparison(getattr(operator, name)))
        kind.__neg__ = _unary(operator.neg)
        kind.__abs__ = _unary(abs)
        kind.__ceil__ = _unary(math.ceil)
        kind.__floor__ = _unary(math.floor)
        kind.__divmod__ = lambda a, b: (a // b, a % b)
        kind.__rdivmod__ = lambda a, b: (b // a, b % a)
    for kind, base in ((TrackedInt, int), (TrackedFloat, float)):
        kind.__bool__ = _truth
        kind.__hash__ = base.__hash__


_install()
