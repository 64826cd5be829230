"""Which plain Python values a recorded run reads: attributes of modules and of objects in them, the trainer, variables.

Attribute reads are intercepted while the run goes on, so a configuration of hundreds of values counts with those that
were read. Containers count with all that they hold. Numbers that are inputs of the graph are put in their places.
"""

from __future__ import annotations

import functools
import math
import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.model_state.own_names import OWN_NAMES
from pipepart.recording.model_state.places import (
    MISSING,
    Attribute,
    ClassAttributes,
    Contents,
    Guards,
    Place,
    Same,
    Typed,
    copy_of,
    is_number,
    is_plain_value,
    keys_of,
)
from pipepart.recording.model_state.reachable import is_foreign
from pipepart.recording.trace import symbols

__all__ = ["Reads", "active"]

_LIMIT = 64
"""Items: a larger container is compared as a whole."""
_TOO_LARGE = 4096
"""Items: what changes inside of a larger container is not noticed."""
_NAMESPACES = (types.SimpleNamespace, Namespace)
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, functools.partial)
_MATH = (
    "acos", "asin", "atan", "atan2", "cos", "cosh", "erf", "exp", "expm1", "fabs", "hypot", "log", "log10", "log1p",
    "log2", "pow", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip

_running: list[Reads] = []


def active() -> Reads | None:
    """The reads of the run that is being recorded, if there is one."""
    return _running[-1] if _running else None


class Reads:
    """Collects what one recorded run reads. `watching` says whether the user's Python runs, and not an op kept whole."""

    def __init__(
        self,
        paths: Mapping[int, str],
        is_skipped: Callable[[nn.Module], bool],
        watching: Callable[[], bool],
        numbers: Sequence[tuple[Place, Any]],
    ) -> None:
        self._paths, self._is_skipped, self._watching = paths, is_skipped, watching
        self._numbers = numbers
        self._inputs = {place.text: number for place, number in numbers}
        self._entries: dict[str, tuple[Place, Any]] = {}
        self._known: dict[int, Place] = {}
        self._kept: list[Any] = []
        self._done: set[tuple[int, str]] = set()
        self._patched: dict[type, Any] = {}
        self._quiet = False
        self.notes: list[str] = []

    def guards(self) -> Guards:
        """What the run has read, but for the numbers that are inputs of the graph."""
        return Guards(tuple(self._entries.values()))

    @contextmanager
    def collecting(self, variables: Sequence[Place]) -> Iterator[None]:
        """Intercept reads, with the numbers of the graph in their places; `variables` count as read."""
        module_class: Any = nn.Module
        absent = nn.Module.__getattr__
        with ExitStack() as stack:
            for place, number in self._numbers:
                before = place.read()
                if place.write(number):
                    stack.callback(place.write, before)
            stack.enter_context(_math_on_numbers())
            module_class.__getattribute__ = self._module_read()
            module_class.__getattr__ = self._module_absent(absent)
            _running.append(self)
            try:
                for place in variables:
                    self._note(place, place.read())
                yield
            finally:
                _running.pop()
                del module_class.__getattribute__
                module_class.__getattr__ = absent
                for kind, own in self._patched.items():
                    restore: Any = kind
                    if own is MISSING:
                        del restore.__getattribute__
                    else:
                        restore.__getattribute__ = own
                self._patched.clear()
                self._kept.clear()
                self._known.clear()

    # ---- modules

    def _module_read(self) -> Callable[[Any, str], Any]:
        get, done, watching = object.__getattribute__, self._done, self._watching

        def read(module: Any, name: str) -> Any:
            value = get(module, name)
            if name in OWN_NAMES or name[:2] == "__" or (id(module), name) in done:
                return value
            if not watching():
                return symbols.plain(value)  # inside of a module that is one op
            if type(value) is not symbols.StepNumber:
                self._of_module(module, name, value)
            return value

        return read

    def _module_absent(self, original: Any) -> Callable[[Any, str], Any]:
        def absent(module: Any, name: str) -> Any:
            try:
                return original(module, name)
            except AttributeError:
                path = self._paths.get(id(module))
                if path is not None and name[:2] != "__" and self._watching() and not self._is_skipped(module):
                    base = f"self.{path}.{name}" if path else f"self.{name}"
                    for registry in ("", "_parameters", "_buffers", "_modules"):
                        where: Any = vars(module) if not registry else vars(module).get(registry)
                        if isinstance(where, dict):
                            text = f"{base} in {registry}" if registry else base
                            self._entries.setdefault(text, (Place(text, where, name), MISSING))
                raise

        return absent

    def _of_module(self, module: Any, name: str, value: Any) -> None:
        self._done.add((id(module), name))
        path = self._paths.get(id(module))
        if path is None or self._is_skipped(module):
            return
        text = f"self.{path}.{name}" if path else f"self.{name}"
        own = vars(module)
        if name in own:
            if not isinstance(value, torch.Tensor):  # the graph reads tensors where they are
                self._note(Place(text, own, name), value)
            return
        for base in type(module).__mro__:
            if name in base.__dict__:
                of_user = not is_foreign(base.__module__) and not hasattr(type(value), "__get__")
                if of_user and base.__dict__[name] is value:
                    self._entries.setdefault(f"{text} itself", (Place(f"{text} itself", own, name), MISSING))
                    self._note(Place(f"{base.__qualname__}.{name}", ClassAttributes(base), name), value)
                return

    # ---- the trainer

    def of_trainer(self, trainer: Any, name: str) -> Any:
        """An attribute of the trainer that the step reads."""
        self._quiet = True
        try:
            value = getattr(trainer, name)
        finally:
            self._quiet = False
        text = f"trainer.{name}"
        if text in self._inputs:
            return self._inputs[text]
        if not callable(value) or isinstance(value, nn.Module):
            self._note(Place(text, Attribute(trainer), name), value, lightning=True)
        return value

    # ---- anything else

    def _note(self, place: Place, value: Any, depth: int = 0, lightning: bool = False) -> None:
        if symbols.is_tracked(value) or place.text in self._entries or isinstance(value, nn.Module):
            return
        kind = type(value)
        if is_plain_value(value):
            self._entries[place.text] = (place, value)
        elif isinstance(value, (torch.Tensor, *_CALLABLE)):
            self._entries[place.text] = (place, Same(value))
        elif kind.__module__.startswith("omegaconf.") and "_content" in vars(value):
            self._configuration(place, value, depth)
        elif isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            self._container(place, value, depth, lightning)
        elif isinstance(value, _NAMESPACES):
            self._kept.append(value)
            self._entries[place.text] = (place, Typed(kind))
            self._items(place, [("vars", name) for name in vars(value)], vars(value).values(), depth, lightning)
        elif lightning or not is_foreign(kind.__module__):
            self._object(place, value, lightning)

    def _container(self, place: Place, value: Any, depth: int, lightning: bool) -> None:
        original = getattr(type(value), "_pipepart_original", type(value))
        if original is not type(value):  # one that tells what is done to it; this does not count
            value = value.pipepart_items()
        self._entries[place.text] = (place, Typed(original))
        if len(value) > _TOO_LARGE or depth > 4:
            self.notes.append(f"{place.text}: a container of {len(value)} items; changes inside of it are not noticed")
        elif isinstance(value, (set, frozenset)) or len(value) > _LIMIT or _has_no_numbers(value):
            self._entries[f"{place.text}, all"] = (_named(place, f"{place.text}, all"), Contents(copy_of(value)))
        else:
            keys = Place(f"keys of {place.text}", place.owner, place.key, (*place.steps, ("keys", None)))
            self._entries[keys.text] = (keys, keys_of(value))
            names: Any = list(value) if isinstance(value, dict) else range(len(value))
            items = dict.values(value) if isinstance(value, dict) else tuple(value)
            self._items(place, [("item", name) for name in names], items, depth, lightning)

    def _configuration(self, place: Place, value: Any, depth: int) -> None:
        """A configuration of OmegaConf keeps each value in a node of its own."""
        content = vars(value)["_content"]
        inside = (*place.steps, ("vars", "_content"))
        if not isinstance(content, (dict, list)):
            self._note(Place(place.text, place.owner, place.key, inside), content, depth)
            return
        keys = Place(f"keys of {place.text}", place.owner, place.key, (*inside, ("keys", None)))
        self._entries[keys.text] = (keys, keys_of(content))
        for key, node in content.items() if isinstance(content, dict) else enumerate(content):
            steps = (*inside, ("item", key))
            if "_val" in vars(node):
                steps = (*steps, ("vars", "_val"))
            self._note(
                Place(f"{place.text}.{key}", place.owner, place.key, steps), vars(node).get("_val", node), depth + 1
            )

    def _items(self, place: Place, steps: Sequence[Any], values: Any, depth: int, lightning: bool) -> None:
        for (kind, key), value in zip(steps, list(values)):
            text = f"{place.text}[{key!r}]" if kind == "item" else f"{place.text}.{key}"
            where = Place(text, place.owner, place.key, (*place.steps, (kind, key)))
            self._note(where, value, depth + 1, lightning)

    def _object(self, place: Place, value: Any, lightning: bool) -> None:
        """An object of a Python class: what is read of it counts."""
        if id(value) in self._known:
            return
        kind = type(value)
        self._entries[place.text] = (place, Typed(kind))
        self._known[id(value)] = place
        self._kept.append(value)
        if kind in self._patched:
            return
        original: Any = kind.__getattribute__

        def read(thing: Any, name: str) -> Any:
            place = self._known.get(id(thing))
            if place is None or self._quiet or name[:2] == "__":
                return original(thing, name)
            if not self._watching():
                return symbols.plain(original(thing, name))
            if not lightning:
                return self._of_object(thing, place, name, original(thing, name), False)
            self._quiet = True
            try:
                found = original(thing, name)
            finally:
                self._quiet = False
            return self._of_object(thing, place, name, found, True)

        own = kind.__dict__.get("__getattribute__", MISSING)
        patched: Any = kind
        try:
            patched.__getattribute__ = read
        except TypeError:  # a class of C
            return
        self._patched[kind] = own

    def _of_object(self, thing: Any, place: Place, name: str, value: Any, lightning: bool) -> Any:
        text = f"{place.text}.{name}"
        if text in self._inputs:
            return self._inputs[text]
        if (id(thing), name) in self._done:
            return value
        self._done.add((id(thing), name))
        step = ("attr", name)
        try:
            if name in object.__getattribute__(thing, "__dict__"):
                step = ("vars", name)
        except AttributeError:
            pass
        if step[0] == "attr":
            base = next((base for base in type(thing).__mro__ if name in base.__dict__), None)
            found = base.__dict__[name] if base is not None else MISSING
            if isinstance(found, property) and not lightning:
                return value  # what it reads counts
            if isinstance(value, _CALLABLE):
                return value
        self._note(Place(text, place.owner, place.key, (*place.steps, step)), value, lightning=lightning)
        return value


def _has_no_numbers(value: Any) -> bool:
    """Whether a container holds texts, flags and functions alone: none of its items can become an input."""
    items = tuple(dict.values(value) if isinstance(value, dict) else value)
    return bool(items) and all(
        isinstance(item, _CALLABLE) or (is_plain_value(item) and not is_number(item)) for item in items
    )


def _named(place: Place, text: str) -> Place:
    return Place(text, place.owner, place.key, place.steps)


@contextmanager
def _math_on_numbers() -> Iterator[None]:
    """Functions of `math` that take tracked numbers: their results are tracked too."""
    originals = {name: getattr(math, name) for name in _MATH}

    def tracking(function: Any) -> Any:
        def call(*args: Any) -> Any:
            if any(isinstance(argument, symbols.StepNumber) for argument in args):
                return symbols.derive(function, *args)
            return function(*args)

        return call

    for name, function in originals.items():
        setattr(math, name, tracking(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(math, name, function)
