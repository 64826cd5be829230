"""Changes of Python state outside of the attributes of modules: a recorded call would not make them.

Three kinds of values are compared before and after a call: variables of enclosing functions and of files that the methods
and hooks of the modules use, attributes of their classes, and attributes of plain objects that modules hold, such as the
hyperparameters of a LightningModule. Changes by hooks of leaf modules are
allowed: a recorded call really calls leaf modules.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.model_state.places import CONTAINERS, Cell, ClassAttributes, Owner, Place, refill, same_items
from pipepart.recording.model_state.reachable import OWN_NAMES, functions_of, is_foreign, is_library, user_classes

__all__ = ["Effects"]

_NUMBERS = (bool, int, float, complex, str, type(None))
_NO_OBJECTS = frozenset({*_NUMBERS, *CONTAINERS, tuple, torch.Tensor, nn.Parameter})
_OPAQUE = (torch.Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True)
class _Variable:
    """A variable, the path of a module that refers to it, its value before the call, and a copy of a container."""

    module: str
    place: Place
    value: Any
    copy: Any

    def change(self) -> str | None:
        """Return the change in words; None if the variable is as before."""
        now = self.place.owner.get(self.place.key)
        if now is not self.value:
            plain = isinstance(now, _NUMBERS) and isinstance(self.value, _NUMBERS)
            if plain and (type(now) is not type(self.value) or now != self.value):
                return f"before: {str(self.value)[:60]}, after: {str(now)[:60]}"
            return None
        if self.copy is not None and not same_items(self.copy, now):
            return f"{len(self.copy)} items before, {len(now)} after" if len(now) != len(self.copy) else "other items"
        return None

    def restore(self) -> None:
        """Put back a number, or the items of a container."""
        if self.change() is None:
            return
        if self.copy is None:
            self.place.write(self.value)
        else:
            refill(self.value, self.copy)


class Effects:
    """The Python state around modules at one moment. `is_whole` tells which modules are really called at every step."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], is_whole: Callable[[nn.Module, str], bool]):
        self.variables: list[_Variable] = []
        self._seen: set[int] = set()
        inside = "."  # path of the last module that is whole; its submodules come directly after it
        for path, module in modules:
            if path.startswith(inside):
                continue
            if path and is_whole(module, path):
                inside = f"{path}."
                continue
            for function in functions_of(type(module)):
                self._function(path, function)
            for base in user_classes(type(module)):
                self._class(path, base)
            for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
                self._hook(path, hook)
            for name, value in vars(module).items():
                if name == "_hparams" and isinstance(value, dict):
                    for key in value:
                        self._add(path, f"hyperparameter {key!r}", value, key)
                elif isinstance(value, _FUNCTIONS):
                    self._put_on(path, value)
                elif type(value) not in _NO_OBJECTS and name not in OWN_NAMES:
                    self._object(path, f"attribute {name!r}", value)

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield the module path and a description of each variable that has changed."""
        for variable in self.variables:
            change = variable.change()
            if change is not None:
                yield variable.module, f"{variable.place.text} ({change})"

    def restore(self, modules: Collection[str] | None = None) -> None:
        """Put back all changed variables, or those that these modules refer to."""
        for variable in self.variables:
            if modules is None or variable.module in modules:
                variable.restore()

    def _is_new(self, thing: Any) -> bool:
        new = id(thing) not in self._seen
        self._seen.add(id(thing))
        return new

    def _class(self, path: str, kind: type) -> None:
        if not self._is_new(kind):
            return
        for name, value in list(vars(kind).items()):
            if (type(value) in CONTAINERS or isinstance(value, _NUMBERS)) and not name.startswith("__"):
                self._add(path, f"attribute {name!r} of class {kind.__qualname__}", ClassAttributes(kind), name)

    def _function(self, path: str, function: types.FunctionType) -> None:
        if not self._is_new(function):
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if name != "__class__":
                self._add(path, f"variable {name!r} around {function.__qualname__}", Cell(cell), name)
        for name in _names(code):
            if name in function.__globals__:
                self._add(path, f"global {name!r} of {function.__module__}", function.__globals__, name)

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

    def _put_on(self, path: str, function: Any) -> None:
        """A function that was put on a module, in place of a method or beside them."""
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and not is_foreign(function.__globals__.get("__name__")):
            self._function(path, function)

    def _object(self, path: str, text: str, value: Any) -> None:
        known = isinstance(value, _OPAQUE) or is_library(type(value).__module__)
        if known or not isinstance(getattr(value, "__dict__", None), dict) or not self._is_new(value):
            return
        for name in vars(value):
            self._add(path, f"{text} of module {path!r}: its {name!r}", vars(value), name)

    def _add(self, path: str, text: str, owner: Owner, key: str) -> None:
        value = owner.get(key)
        if type(value) in CONTAINERS:
            self.variables.append(_Variable(path, Place(text, owner, key), value, value.copy()))
        elif isinstance(value, _NUMBERS):
            self.variables.append(_Variable(path, Place(text, owner, key), value, None))


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found
