"""Places of plain Python values that a recording was made with, and the check that their values are unchanged.

A place is found again from an object that stays (the ``__dict__`` of a module, the variables of a file, the trainer) by a
few steps. So if an object is replaced by another one of its kind, the new one is checked.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

__all__ = [
    "CONTAINERS",
    "MISSING",
    "Attribute",
    "Cell",
    "Change",
    "ClassAttributes",
    "Contents",
    "Guards",
    "Owner",
    "Place",
    "Same",
    "Step",
    "Typed",
    "copy_of",
    "is_number",
    "is_plain_value",
    "keys_of",
    "number_of",
    "refill",
    "same_items",
]

MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "nothing"})()
"""The value of a place that does not exist."""

_FAST: frozenset[type] = frozenset({bool, int, float, str, type(None)})
_NUMBERS: tuple[type, ...] = (*_FAST, complex)
_PLAIN: tuple[type, ...] = (*_NUMBERS, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, np.generic)


def is_plain_value(value: Any) -> bool:
    """Return whether a value is a number, a text, a flag, None, a dtype, a member of an enum, or a tuple of such values."""
    if type(value) in _FAST:
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(is_plain_value(item) for item in value)
    return isinstance(value, _PLAIN)


def is_number(value: Any) -> bool:
    """Return whether a graph can compute with a value as one of its inputs."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, enum.Enum))


def number_of(value: Any) -> int | float:
    """Return a number, perhaps of numpy, as a number of Python."""
    return int(value) if isinstance(value, (int, np.integer)) else float(value)


# ---------------------------------------------------------------- containers

CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
"""Types of containers whose items a call may change."""


def copy_of(container: Any) -> Any:
    """Return a copy of a container, to compare it with later."""
    if isinstance(container, deque):
        return deque(container, container.maxlen)
    return dict(container) if isinstance(container, Mapping) else type(container)(container)


def refill(container: Any, items: Any) -> None:
    """Give a container these items and no others."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(items)


def same_items(a: Any, b: Any) -> bool:
    """Return whether two containers of one type hold the same objects; numbers and texts are compared by value."""
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and _same(value, b[key]) for key, value in a.items())
    if isinstance(a, set):
        return bool(a == b)
    return all(_same(x, y) for x, y in zip(a, b))


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _NUMBERS) and a == b)


# ---------------------------------------------------------------- places


class Owner(Protocol):
    """An object that places start from: a dictionary, or one of the classes below."""

    def get(self, key: Any, default: Any = None, /) -> Any: ...


class Cell:
    """The variable of an enclosing function; the key is not used."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def get(self, key: Any, default: Any = None, /) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not filled yet
            return default

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value


class ClassAttributes:
    """The own attributes of a class."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def get(self, key: Any, default: Any = None, /) -> Any:
        return self.kind.__dict__.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        setattr(self.kind, key, value)


class Attribute:
    """The attributes of an object, including properties; they are only read."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def get(self, key: Any, default: Any = None, /) -> Any:
        return getattr(self.thing, key, default)


Step = tuple[str, Any]
"""One step from an object to a part of it: ("vars", name), ("attr", name), ("item", key) or ("keys", None)."""


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a value: an owner that stays, the key in it, and steps from there. `text` is unique in a recording."""

    text: str
    owner: Owner
    key: Any
    steps: tuple[Step, ...] = ()

    def inside(self, text: str, *steps: Step) -> Place:
        """Return the place that some steps from here lead to."""
        return Place(text, self.owner, self.key, (*self.steps, *steps))

    def read(self) -> Any:
        """Return the value that is in the place now; `MISSING` if there is none."""
        value = self.owner.get(self.key, MISSING)
        for step in self.steps:
            if value is MISSING:
                return value
            value = _take(value, step)
        return value

    def write(self, value: Any) -> bool:
        """Put a value into the place, and return True; False if the place can only be read, such as a property."""
        if not self.steps:
            parent, kind, key = self.owner, "item", self.key
        else:
            parent = replace(self, steps=self.steps[:-1]).read()
            kind, key = self.steps[-1]
        if kind == "vars":
            vars(parent)[key] = value
        elif kind == "item" and hasattr(parent, "__setitem__"):
            parent[key] = value
        else:
            return False
        return True


def _take(value: Any, step: Step) -> Any:
    kind, key = step
    try:
        if kind == "vars":
            return value.__dict__.get(key, MISSING)
        if kind == "attr":
            return getattr(value, key, MISSING)
        if kind == "keys":
            return keys_of(value)
        return value[key]
    except Exception:
        return MISSING


def keys_of(value: Any) -> Any:
    """Return the keys or the length of a container, to see whether it has the same places as before."""
    if isinstance(value, Mapping):
        return tuple(value)
    return frozenset(value) if isinstance(value, (set, frozenset)) else len(value)


# ---------------------------------------------------------------- guards


@dataclass(frozen=True)
class Typed:
    """Expectation for a place that holds an object: its type. Attributes of the object have places of their own."""

    kind: type


@dataclass(frozen=True, eq=False)
class Same:
    """Expectation for a place that holds an opaque value: the identical object."""

    value: Any


@dataclass(frozen=True, eq=False)
class Contents:
    """Expectation for a large container: equal contents."""

    copy: Any


@dataclass(frozen=True)
class Change:
    """A place whose value is not the recorded one."""

    place: Place
    before: Any
    now: Any

    @property
    def is_number(self) -> bool:
        """Whether a recording with this number as an input would be valid for both values."""
        countable = not self.place.steps or self.place.steps[-1][0] != "keys"
        return countable and is_number(self.before) and is_number(self.now)

    def __str__(self) -> str:
        return f"{self.place.text} (was {_short(self.before)}, is {_short(self.now)})"


def _short(value: Any) -> str:
    if isinstance(value, Typed):
        return f"a {value.kind.__name__}"
    value = value.value if isinstance(value, Same) else value.copy if isinstance(value, Contents) else value
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Guards:
    """All places that a recording depends on, with their expected values."""

    def __init__(self, entries: tuple[tuple[Place, Any], ...] = ()) -> None:
        self.entries = entries
        self._flat = [(p.owner.get, p.key, value, p) for p, value in entries if not p.steps]
        self._deep = [(p, value) for p, value in entries if p.steps]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def on_contents(self) -> bool:
        """Whether the recording depends on the length, the keys or the contents of a container."""
        return any(
            isinstance(value, Contents) or (place.steps and place.steps[-1][0] == "keys")
            for place, value in self.entries
        )

    def changes(self, first: bool = False) -> list[Change]:
        """Return the places with another value now; with `first`, only the first of them."""
        return list(islice(self._changed(), 1 if first else None))

    def _changed(self) -> Iterator[Change]:
        for get, key, expected, place in self._flat:  # most places; checked before every step
            now = get(key, MISSING)
            if now is not expected and not _holds(now, expected):
                yield Change(place, expected, now)
        for place, expected in self._deep:
            now = place.read()
            if now is not expected and not _holds(now, expected):
                yield Change(place, expected, now)

    def without(self, dropped: Callable[[Place], bool]) -> Guards:
        """Return the guards except those of some places."""
        return Guards(tuple(entry for entry in self.entries if not dropped(entry[0])))

    def values(self) -> dict[str, str]:
        """Return the plain expected values as text, by the name of the place, to compare between processes."""
        return {place.text: repr(value) for place, value in self.entries if is_plain_value(value)}


def _holds(now: Any, expected: Any) -> bool:
    kind = type(expected)
    if kind is Typed:
        original = getattr(type(now), "_pipepart_original", None)  # a watched class refers to the class of the user
        return expected.kind in (type(now), original)
    if kind is Same:
        return now is expected.value
    if kind is Contents:
        return _equal(now, expected.copy)
    return type(now) is kind and _equal(now, expected)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)
    except Exception:
        return False
