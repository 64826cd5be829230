"""Python state outside of the modules' own attributes that a call changes: a recorded call would not change it.

Looked at: variables of enclosing functions and of files that the methods and hooks of the modules use, and the
attributes of plain objects that modules hold. What a hook of a leaf changes is no concern: leaves are really called.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from pipepart.recording.model_state.own_names import OWN_NAMES

__all__ = ["Effects", "same_items"]

_NUMBERS = (bool, int, float, complex, str, type(None))
_CONTAINERS = (
    list,
    dict,
    set,
    collections.deque,
    collections.Counter,
    collections.OrderedDict,
    collections.defaultdict,
)
_NO_OBJECTS = frozenset({*_NUMBERS, *_CONTAINERS, tuple, torch.Tensor, nn.Parameter})
_LIBRARIES = ("torch.", "torchmetrics.", "lightning.", "pytorch_lightning.", "pipepart.", "builtins", "collections")


@dataclass(frozen=True)
class _Place:
    """One variable: where a module refers to it, and what it held before."""

    module: str
    text: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any
    copy: Any

    def change(self) -> str | None:
        """What became of it, or None if it is as before."""
        now = self.read()
        if now is not self.value:
            plain = isinstance(now, _NUMBERS) and isinstance(self.value, _NUMBERS)
            if plain and (type(now) is not type(self.value) or now != self.value):
                return f"before: {str(self.value)[:60]}, after: {str(now)[:60]}"
            return None
        if self.copy is not None and not same_items(self.copy, now):
            return f"{len(self.copy)} items before, {len(now)} after" if len(now) != len(self.copy) else "other items"
        return None

    def restore(self) -> None:
        """Put a number, or the items of a container, back."""
        if self.change() is None:
            return
        if self.copy is None:
            self.write(self.value)
            return
        self.value.clear()
        (self.value.extend if isinstance(self.value, (list, collections.deque)) else self.value.update)(self.copy)


class Effects:
    """The Python state around a module at one moment. `is_whole` says which modules are really called at every step."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], is_whole: Callable[[nn.Module, str], bool]):
        self.places: list[_Place] = []
        self._seen: set[int] = set()
        inside = "."  # the last module that is whole: what is in it follows at once
        for path, module in modules:
            if path.startswith(inside):
                continue
            if path and is_whole(module, path):
                inside = f"{path}."
                continue
            for function in _functions(type(module)):
                self._function(path, function)
            for base in _user_classes(type(module)):
                self._class(path, base)
            for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
                self._hook(path, hook)
            for name, value in vars(module).items():
                if type(value) not in _NO_OBJECTS and name not in OWN_NAMES:
                    self._object(path, f"attribute {name!r}", value)

    def changes(self) -> Iterator[tuple[str, str]]:
        """Module path and description of each variable that is another one now."""
        for place in self.places:
            change = place.change()
            if change is not None:
                yield place.module, f"{place.text} ({change})"

    def restore(self, modules: Collection[str] | None = None) -> None:
        """Put back what has changed, all or what these modules refer to."""
        for place in self.places:
            if modules is None or place.module in modules:
                place.restore()

    def _class(self, path: str, kind: Any) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for name, value in list(vars(kind).items()):
            if type(value) in _CONTAINERS and not name.startswith("__"):
                text = f"attribute {name!r} of class {kind.__qualname__}"
                self._add(path, text, partial(_own, kind, name), partial(setattr, kind, name))

    def _function(self, path: str, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        code: types.CodeType = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if name != "__class__":
                self._add(path, f"variable {name!r} around {function.__qualname__}", *_cell(cell))
        for name in _names(code):
            if name in function.__globals__:
                self._add(path, f"global {name!r} of {function.__module__}", *_item(function.__globals__, name))

    def _hook(self, path: str, hook: Any) -> None:
        hook = getattr(hook, "func", hook)  # a partial
        owner = getattr(hook, "__self__", None)
        if owner is not None and not isinstance(owner, nn.Module):
            self._object(path, f"{type(owner).__name__} behind a hook", owner)
        function = getattr(hook, "__func__", hook)
        if isinstance(function, types.FunctionType):
            self._function(path, function)
        elif callable(hook):
            self._object(path, f"hook {type(hook).__name__}", hook)

    def _object(self, path: str, text: str, value: Any) -> None:
        home = f"{type(value).__module__}."
        if (
            isinstance(value, (torch.Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType))
            or not isinstance(getattr(value, "__dict__", None), dict)
            or home.startswith(_LIBRARIES)
            or id(value) in self._seen
        ):
            return
        self._seen.add(id(value))
        for name in vars(value):
            self._add(path, f"{text} of module {path!r}: its {name!r}", *_item(vars(value), name))

    def _add(self, path: str, text: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        value = read()
        if type(value) in _CONTAINERS:
            self.places.append(_Place(path, text, read, write, value, value.copy()))
        elif isinstance(value, _NUMBERS):
            self.places.append(_Place(path, text, read, write, value, None))


def _own(kind: type, name: str) -> Any:
    return vars(kind).get(name)


def _user_classes(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if not f"{base.__module__}.".startswith(_LIBRARIES)]


def _functions(kind: type) -> list[Any]:
    """The methods of a module class that a user wrote."""
    if kind not in _methods:
        _methods[kind] = [
            value
            for base in _user_classes(kind)
            for value in vars(base).values()
            if isinstance(value, types.FunctionType)
        ]
    return _methods[kind]


_methods: WeakKeyDictionary[type, list[Any]] = WeakKeyDictionary()
"""Weak: classes that are made for one recording hold on to the module that was recorded."""


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


Access = tuple[Callable[[], Any], Callable[[Any], None]]
"""How to read and how to write a variable."""


def _cell(cell: Any) -> Access:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not filled yet
            return None

    return read, lambda value: setattr(cell, "cell_contents", value)


def _item(names: dict[str, Any], name: str) -> Access:
    return lambda: names.get(name), lambda value: names.__setitem__(name, value)


def same_items(a: Any, b: Any) -> bool:
    """Whether two containers of one type hold the same objects; numbers and text are compared by value."""
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and _same(value, b[key]) for key, value in a.items())
    if isinstance(a, set):
        return bool(a == b)
    return all(_same(x, y) for x, y in zip(a, b))


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS) and type(a) is type(b) and a == b)
