"""Places of plain Python values that a recording was made with, and the check that they still hold what they held.

A place is found again from something that stays (the ``__dict__`` of a module, the variables of a file, the trainer) by
a few steps, so an object that was replaced by another one of its kind is looked at, not the old one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["MISSING", "Change", "Guards", "Place", "Same", "Typed", "is_number", "is_plain_value", "number_of"]

MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "nothing"})()
"""What a place holds if there is none."""

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    np.generic,
)
_FAST = frozenset({bool, int, float, str, type(None)})


def is_plain_value(value: Any) -> bool:
    """Whether a value is a number, a text, a flag, None, a dtype, a member of an enum, or a tuple of such."""
    if type(value) in _FAST:
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(is_plain_value(item) for item in value)
    return isinstance(value, _PLAIN)


def is_number(value: Any) -> bool:
    """Whether a graph can compute with a value as one of its inputs."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, enum.Enum))


def number_of(value: Any) -> int | float:
    """A number as Python's own; numbers of numpy are what they count as."""
    return int(value) if isinstance(value, (int, np.integer)) else float(value)


@dataclass(frozen=True)
class Typed:
    """Expected of a place that holds an object: its type. What was read of the object has places of its own."""

    kind: type


@dataclass(frozen=True, eq=False)
class Same:
    """Expected of a place that holds something that is not looked into: the very object."""

    value: Any


@dataclass(frozen=True, eq=False)
class Contents:
    """Expected of a large container: what it held, compared as a whole."""

    copy: Any


Step = tuple[str, Any]
"""One step from an object to a part of it: ("vars", name), ("attr", name), ("item", key) or ("keys", None)."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is: a mapping that stays, the key in it, and steps from there. `text` names it, once per recording."""

    text: str
    owner: Mapping[str, Any]
    key: Any
    steps: tuple[Step, ...] = ()

    def read(self) -> Any:
        """What is there now, `MISSING` if the way ends before."""
        value = self.owner.get(self.key, MISSING)
        for step in self.steps:
            if value is MISSING:
                return value
            value = _take(value, step)
        return value

    def write(self, value: Any) -> bool:
        """Put a value there; False if it is the result of a property or the like."""
        if not self.steps:
            if not isinstance(self.owner, (dict, Cell, ClassAttributes)):
                return False
            self.owner[self.key] = value
            return True
        parent = Place(self.text, self.owner, self.key, self.steps[:-1]).read()
        kind, key = self.steps[-1]
        if kind == "vars":
            vars(parent)[key] = value
        elif kind == "item" and not isinstance(parent, tuple):
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
    """What tells whether a container has the same places as before: its keys, its length."""
    if isinstance(value, Mapping):
        return tuple(value)
    return frozenset(value) if isinstance(value, (set, frozenset)) else len(value)


class Cell(Mapping[str, Any]):
    """The variable of an enclosing function as a mapping with one entry."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def __setitem__(self, key: str, value: Any) -> None:
        self.cell.cell_contents = value

    def __getitem__(self, key: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not filled yet
            raise KeyError(key) from None

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return default

    def __iter__(self) -> Iterator[str]:
        return iter(("value",))

    def __len__(self) -> int:
        return 1


class ClassAttributes(Mapping[str, Any]):
    """The own attributes of a class as a mapping that can be written to."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __getitem__(self, key: str) -> Any:
        return self.kind.__dict__[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.kind, key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return self.kind.__dict__.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.kind.__dict__)

    def __len__(self) -> int:
        return len(self.kind.__dict__)


class Attribute(Mapping[str, Any]):
    """The attributes of an object, properties included, as a mapping."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getitem__(self, key: str) -> Any:
        return getattr(self.thing, key)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self.thing, key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(dir(self.thing))

    def __len__(self) -> int:
        return len(dir(self.thing))


@dataclass(frozen=True)
class Change:
    """A place that holds something else than when it was recorded."""

    place: Place
    before: Any
    now: Any

    @property
    def is_number(self) -> bool:
        """Whether a recording with this number as an input would hold for it."""
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
    """All places that a recording depends on, with what they held."""

    def __init__(self, entries: tuple[tuple[Place, Any], ...] = ()) -> None:
        self.entries = entries
        self._flat = [(p.owner.get, p.key, value, p) for p, value in entries if not p.steps]
        self._deep = [(p, value) for p, value in entries if p.steps]

    def __len__(self) -> int:
        return len(self.entries)

    def changes(self, first: bool = False) -> list[Change]:
        """What holds something else now; with `first`, the first such place alone."""
        found = []
        for get, key, expected, place in self._flat:
            now = get(key, MISSING)
            if now is not expected and not _holds(now, expected):
                found.append(Change(place, expected, now))
                if first:
                    return found
        for place, expected in self._deep:
            now = place.read()
            if now is not expected and not _holds(now, expected):
                found.append(Change(place, expected, now))
                if first:
                    return found
        return found

    def without(self, dropped: Callable[[Place], bool]) -> Guards:
        """These, but for some places."""
        return Guards(tuple(entry for entry in self.entries if not dropped(entry[0])))

    def values(self) -> dict[str, str]:
        """The plain ones as text by the name of the place, to compare between processes."""
        return {place.text: repr(value) for place, value in self.entries if is_plain_value(value)}


def _holds(now: Any, expected: Any) -> bool:
    kind = type(expected)
    if kind is Typed:
        return type(now) is expected.kind or _original(type(now)) is expected.kind
    if kind is Same:
        return now is expected.value
    if kind is Contents:
        return _equal(now, expected.copy)
    if type(now) is not kind:
        return False
    return _equal(now, expected)


def _original(kind: type) -> type:
    """The class of the user, for one that was made of it while something is watched."""
    return getattr(kind, "_pipepart_original", kind)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)
    except Exception:
        return False


def copy_of(container: Any) -> Any:
    """A copy of a container, to compare it with later."""
    if isinstance(container, deque):
        return deque(container, container.maxlen)
    return dict(container) if isinstance(container, Mapping) else type(container)(container)
