"""Tracked numbers: they know their origin, so that sizes and step counters stay dynamic in a recorded graph.

A size (``x.shape[0]``) must be an `int` for PyTorch and for user code. It is a subclass of `int` that can make an fx
node of itself when it is used. A step counter is not an `int`: ``float * int_subclass`` would not call the methods of
the subclass, and a constant in place of a counter is wrong at the next step.

A number is tracked only while its own recording runs. User code may keep it longer, as a key or a value of a cache.
From then on it is a plain number, also for the next recording, and it refers to nothing of its recording.
"""

from __future__ import annotations

import math
import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from pipepart.recording.recorded_run import texts
from pipepart.recording.recorded_run.numpy_calls import TakenByNumpy

__all__ = [
    "Owner",
    "StepNumber",
    "Tracked",
    "TrackedFloat",
    "TrackedInt",
    "atoms_of",
    "derive",
    "finish",
    "fixed",
    "fixed_sizes",
    "is_followed",
    "is_of_step",
    "is_tracked",
    "plain",
    "track",
    "value_from",
]


class Owner(Protocol):
    """Interface of the recorder of a number."""

    @property
    def recording(self) -> bool: ...

    @property
    def graph(self) -> fx.Graph: ...

    @property
    def tracked(self) -> list[Tracked]: ...

    def number_node(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node: ...

    def compared(self, op: Callable[..., Any], a: Any, b: Any, result: bool, from_data: bool) -> None: ...

    def hashed(self, frame: types.FrameType) -> None: ...

    @property
    def converting(self) -> bool: ...

    def converted(self, number: Tracked) -> None: ...


class Tracked(TakenByNumpy):
    """State of a tracked number: its owner, and how to make its node, at most once and when it is first used."""

    owner: Owner | None
    """Recorder of the number; None once its recording is over."""
    make: Callable[[], fx.Node] | None
    made: fx.Node | None
    from_data: bool
    parts: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    """The function and the operands from which the number is computed; None for a size or an input."""
    tensor: torch.Tensor | None = None
    """The tensor whose item the number is."""

    def node(self) -> fx.Node:
        if self.made is None:
            assert self.make is not None, "the recording is over"
            self.made = self.make()
        return self.made

    def __deepcopy__(self, memo: Any) -> Any:
        return plain(self)

    def __reduce__(self) -> Any:
        return type(plain(self)), (plain(self),)


class TrackedInt(Tracked, int):
    """An `int` that is a size of a tensor or came from ``Tensor.item()``."""

    def __int__(self) -> int:
        _converted(self)
        return int.__index__(self)

    def __float__(self) -> float:
        _converted(self)
        return float(int.__index__(self))


class TrackedFloat(Tracked, float):
    """A `float` computed from tracked numbers or from ``Tensor.item()``."""

    def __float__(self) -> float:
        _converted(self)
        return float.__float__(self)

    def __int__(self) -> int:
        _converted(self)
        return float.__int__(self)


_CLASSES: dict[type, type] = {int: int, float: float}


class StepNumber(Tracked):
    """A number that changes from step to step (``batch_idx``). Using its value in Python adds a guard.

    `of_state` marks numbers of the user's Python state and numbers computed from them. ``isinstance(number, int)`` holds as
    for the number itself.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _CLASSES.get(type(self.value), StepNumber)

    def __init__(self, value: int | float, owner: Owner, make: Callable[[], fx.Node], of_state: bool = False):
        self.value, self.owner, self.make, self.made, self.from_data = value, owner, make, None, False
        owner.tracked.append(self)
        self.of_state = of_state

    def concrete(self) -> Any:
        """Return the value; from now on the graph holds for this value only."""
        _looked_at(operator.eq, self, self.value, True)
        return self.value

    def __int__(self) -> int:
        _converted(self)
        return int(self.concrete())

    def __index__(self) -> int:
        return operator.index(self.concrete())

    def __float__(self) -> float:
        _converted(self)
        return float(self.concrete())

    def __hash__(self) -> int:
        return hash(self.concrete())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.concrete(), dtype=dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        strip = pytree.tree_map_only(StepNumber, lambda number: number.value, (args, kwargs or {}))
        return func(*strip[0], **strip[1])


def is_tracked(value: Any) -> bool:
    """Return whether `value` is a tracked number of a recording that is running."""
    return isinstance(value, Tracked) and value.owner is not None and value.owner.recording


def is_of_step(value: Any) -> bool:
    """Return whether `value` is a tracked number of the step, or was read from a tensor; sizes alone are not."""
    return is_tracked(value) and (type(value) is StepNumber or value.from_data)


def is_followed(value: Any) -> bool:
    """Return whether functions of Python must keep track of a number: one of the step or from data, or any if the run does.

    Functions of sizes are found by runs at several sizes.
    """
    if not isinstance(value, Tracked) or value.owner is None or not value.owner.recording:
        return False
    return isinstance(value, StepNumber) or value.from_data or value.owner.converting


def finish(numbers: list[Tracked]) -> None:
    """Make these numbers plain: their recording is over, and they no longer refer to it."""
    for number in numbers:
        number.owner, number.make, number.made = None, None, None
        number.parts, number.tensor = None, None
    numbers.clear()


def _converted(number: Tracked) -> None:
    """Tell the recorder that Python makes a plain number of a tracked one, so that its origin is lost."""
    if is_tracked(number) and number.owner is not None:
        number.owner.converted(number)


def atoms_of(number: Tracked) -> dict[int, Any]:
    """Return the values from which a tracked number is computed, by identity: inputs, sizes, and tensors with one item."""
    found: dict[int, Any] = {}
    todo: list[Any] = [number]
    while todo:
        part = todo.pop()
        if not is_tracked(part):
            continue
        if part.parts is not None:
            todo.extend(part.parts[1])
        else:
            found[id(part)] = part if part.tensor is None else part.tensor
    return found


def value_from(number: Any, atoms: Mapping[int, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return the computation of a number from other values of its atoms; ``atoms[key](values)`` is the value of an atom."""
    if not is_tracked(number):
        constant = plain(number)
        return lambda values: constant
    if number.parts is None:
        atom = atoms[id(number)]
        if number.tensor is None:
            return atom
        return lambda values: _item(atom(values))
    target, operands = number.parts
    parts = [value_from(operand, atoms) for operand in operands]
    return lambda values: target(*(part(values) for part in parts))


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def plain(value: Any) -> Any:
    """Return the plain number of a tracked one, and any other value unchanged."""
    if isinstance(value, TrackedInt):
        return int.__index__(value)
    if isinstance(value, TrackedFloat):
        return float.__float__(value)
    if isinstance(value, StepNumber):
        return value.value
    return value


def track(value: Any, owner: Owner, make: Callable[[], fx.Node], from_data: bool = False) -> Any:
    """Return `value` as a tracked number if it is an int or a float, and unchanged otherwise."""
    kind: Any = {int: TrackedInt, float: TrackedFloat}.get(type(value))
    if kind is None:
        return value
    number = kind.__new__(kind, value)
    number.owner, number.make, number.made, number.from_data = owner, make, None, from_data
    owner.tracked.append(number)
    return number


_SHAPED_BY_FLOATS = frozenset({"interpolate", "upsample", "arange", "range"})


def fixed_sizes(name: str, value: Any) -> Any:
    """Return the arguments of a call, with numbers of the Python state fixed if they may determine the shape of its result.

    Messages between stages have fixed shapes. Whole numbers may be sizes or indices; other numbers determine a shape only
    in a few functions.
    """

    def fix(number: Any) -> Any:
        if number.of_state and (isinstance(number.value, int) or name in _SHAPED_BY_FLOATS):
            return number.concrete()
        return number

    return pytree.tree_map_only(StepNumber, fix, value)


def _looked_at(op: Callable[..., Any], a: Any, b: Any, result: bool) -> None:
    """Tell the recorder that Python has compared a tracked number with another number."""
    tracked = [number for number in (a, b) if is_tracked(number)]
    if tracked:
        tracked[0].owner.compared(op, a, b, result, any(number.from_data for number in tracked))


def fixed(value: Any) -> Any:
    """Return the plain value; if functions must keep track of it, the graph holds for this value only."""
    if is_followed(value):
        _looked_at(operator.eq, value, plain(value), True)
    return plain(value)


def derive(target: Callable[..., Any], *operands: Any) -> Any:
    """Return a number computed from tracked ones; it makes a node of its own when it is used."""
    operands = tuple(operand.item() if isinstance(operand, np.number) else operand for operand in operands)
    value = target(*(plain(operand) for operand in operands))
    tracked = [operand for operand in operands if is_tracked(operand)]
    if not tracked or not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    owner = tracked[0].owner

    def make() -> fx.Node:
        args = tuple(operand.node() if is_tracked(operand) else plain(operand) for operand in operands)
        return owner.number_node(target, args, value)

    if not any(isinstance(number, StepNumber) for number in tracked):
        derived = track(value, owner, make, any(number.from_data for number in tracked))
    else:
        derived = StepNumber(value, owner, make, any(getattr(operand, "of_state", False) for operand in operands))
    derived.parts = (target, operands)
    return derived


def _arithmetic(op: Callable[..., Any], reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor) and isinstance(self, StepNumber):
            number = self.value if self.owner is None else track(self.value, self.owner, self.node)
            return op(other, number) if reflected else op(number, other)
        if not isinstance(other, (int, float, StepNumber)):
            return NotImplemented
        return derive(op, other, self) if reflected else derive(op, self, other)

    return method


def _comparison(op: Callable[..., bool]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float, StepNumber)):
            return NotImplemented
        result = op(plain(self), plain(other))
        _looked_at(op, self, other, result)
        return result

    return method


def _truth(self: Any) -> bool:
    result = bool(plain(self))
    _looked_at(operator.ne, self, 0, result)
    return result


def _hash(base: Any) -> Callable[[Any], int]:
    def method(self: Any) -> int:
        if is_tracked(self):
            self.owner.hashed(sys._getframe(1))
        return int(base.__hash__(self))

    return method


def _unary(target: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda self: derive(target, self)


def _round(self: Any, *digits: Any) -> Any:
    return derive(round, self, *digits) if is_followed(self) else round(plain(self), *digits)


def _text(method: str) -> Callable[..., str]:
    """A method that makes a text of a number. The text of a number of the step holds for its value only."""

    def make(self: Any, *spec: str) -> str:
        made = texts.mark(self, method, *spec) if is_tracked(self) else None
        if made is not None:
            return made
        value = self.concrete() if type(self) is StepNumber else plain(self)
        return str(getattr(value, method)(*spec))

    return make


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
        kind.__bool__ = _truth
        kind.__neg__ = _unary(operator.neg)
        kind.__abs__ = _unary(abs)
        kind.__ceil__ = _unary(math.ceil)
        kind.__floor__ = _unary(math.floor)
        kind.__round__ = _round
        kind.__divmod__ = lambda a, b: (a // b, a % b)
        kind.__rdivmod__ = lambda a, b: (b // a, b % a)
        for name in ("__format__", "__str__", "__repr__"):
            setattr(kind, name, _text(name))
    for kind, base in ((TrackedInt, int), (TrackedFloat, float)):
        kind.__hash__ = _hash(base)


_install()
