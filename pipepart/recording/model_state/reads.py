"""Plain Python values that a recorded run reads: attributes of modules and of their objects, the trainer, variables.

Attribute reads are intercepted during the run, so that only the values that are read become guards, not all values of a
large configuration. All items of a container that is read count. Numbers that are inputs of the graph are put into their
places.
"""

from __future__ import annotations

import functools
import io
import math
import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording.model_state.places import (
    MISSING,
    Attribute,
    ClassAttributes,
    Contents,
    Guards,
    Place,
    Same,
    Step,
    Typed,
    copy_of,
    is_number,
    is_plain_value,
    keys_of,
)
from pipepart.recording.model_state.reachable import OWN_NAMES, is_foreign
from pipepart.recording.recorded_run import symbols

__all__ = ["Reads", "active"]

_LIMIT = 64
"""Number of items above which a container is compared as a whole."""
_TOO_LARGE = 4096
"""Number of items above which changes inside a container are not noticed."""
_NAMESPACES = (types.SimpleNamespace, Namespace)
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, functools.partial)
_MATH = (
    "acos", "asin", "atan", "atan2", "cos", "cosh", "erf", "exp", "expm1", "fabs", "hypot", "log", "log10", "log1p",
    "log2", "pow", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip

_running: list[Reads] = []


def active() -> Reads | None:
    """Return the reads of the run that is being recorded; None if there is none."""
    return _running[-1] if _running else None


class Reads:
    """Collects the places that one recorded run reads.

    `watching` tells whether the Python code of the user runs, as opposed to an op that is kept whole.
    """

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
        self.repeated: frozenset[tuple[str, str]] = frozenset()
        """Attributes of submodules, by path and name, that are set after each call by the code that watches them."""

    @property
    def watching(self) -> bool:
        """Whether the Python code of the user runs, as opposed to an op that is kept whole."""
        return self._watching()

    def guards(self) -> Guards:
        """Return the places that the run has read, except those of numbers that are inputs of the graph."""
        return Guards(tuple(self._entries.values()))

    def _expect(self, place: Place, value: Any) -> None:
        self._entries.setdefault(place.text, (place, value))

    @contextmanager
    def collecting(self, variables: Sequence[Place]) -> Iterator[None]:
        """Intercept reads, with the inputs of the graph in their places. All `variables` count as read."""
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

    def depends(self, place: Place, value: Any) -> None:
        """Note that the recording holds only while a place has this value."""
        self._expect(place, value)

    def is_input(self, text: str) -> bool:
        """Return whether the number at the place that `text` names is an input of the graph."""
        return text in self._inputs

    def wrote(self, module: Any, name: str) -> None:
        """Note that the run has set an attribute: what it reads there from now on is its own value."""
        self._done.add((id(module), name))

    # ---- modules

    def _module_read(self) -> Callable[[Any, str], Any]:
        get, done, watching = object.__getattribute__, self._done, self._watching

        def read(module: Any, name: str) -> Any:
            value = get(module, name)
            if name in OWN_NAMES or name[:2] == "__" or (id(module), name) in done:
                return value
            if not watching():
                return symbols.plain(value)  # inside a module that is one op
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
                            self._expect(Place(f"{base} in {registry}" if registry else base, where, name), MISSING)
                raise

        return absent

    def _of_module(self, module: Any, name: str, value: Any) -> None:
        self._done.add((id(module), name))
        path = self._paths.get(id(module))
        if path is None or self._is_skipped(module):
            return
        text = f"self.{path}.{name}" if path else f"self.{name}"
        _refuse_object(text, value)
        own = vars(module)
        if name in own:
            if not isinstance(value, torch.Tensor):  # the graph reads tensors where they are
                self._note(Place(text, own, name), value)
            return
        for base in type(module).__mro__:
            if name in base.__dict__:
                of_user = not is_foreign(base.__module__) and not hasattr(type(value), "__get__")
                if of_user and base.__dict__[name] is value:
                    self._expect(Place(f"{text} itself", own, name), MISSING)
                    self._note(Place(f"{base.__qualname__}.{name}", ClassAttributes(base), name), value)
                return

    # ---- the trainer

    def of_trainer(self, trainer: Any, name: str) -> Any:
        """Return an attribute of the trainer that the step reads."""
        value = self._quietly(getattr, trainer, name)
        text = f"trainer.{name}"
        if text in self._inputs:
            return self._inputs[text]
        if not callable(value) or isinstance(value, nn.Module):
            self._note(Place(text, Attribute(trainer), name), value, lightning=True)
        return value

    def _quietly(self, read: Callable[[Any, str], Any], thing: Any, name: str) -> Any:
        """Read an attribute of Lightning; reads of its own code do not count."""
        self._quiet = True
        try:
            return read(thing, name)
        finally:
            self._quiet = False

    # ---- anything else

    def _note(self, place: Place, value: Any, depth: int = 0, lightning: bool = False) -> None:
        if symbols.is_tracked(value) or place.text in self._entries or isinstance(value, nn.Module):
            return
        kind = type(value)
        if is_plain_value(value):
            self._expect(place, value)
        elif isinstance(value, (torch.Tensor, *_CALLABLE)):
            self._expect(place, Same(value))
        elif kind.__module__.startswith("omegaconf.") and "_content" in vars(value):
            self._configuration(place, value, depth)
        elif isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            self._container(place, value, depth, lightning)
        elif isinstance(value, _NAMESPACES):
            self._kept.append(value)
            self._expect(place, Typed(kind))
            self._items(place, "vars", vars(value).items(), depth, lightning)
        elif lightning or not is_foreign(kind.__module__):
            self._object(place, value, lightning)

    def _container(self, place: Place, value: Any, depth: int, lightning: bool) -> None:
        original = getattr(type(value), "_pipepart_original", type(value))
        if original is not type(value):  # a watched container: reads by the recorder itself do not count
            value = value.pipepart_items()
        self._expect(place, Typed(original))
        if len(value) > _TOO_LARGE or depth > 4:
            self.notes.append(f"{place.text}: a container of {len(value)} items; changes inside it are not noticed")
        elif isinstance(value, (set, frozenset)) or len(value) > _LIMIT or _has_no_numbers(value):
            self._expect(place.inside(f"{place.text}, all"), Contents(copy_of(value)))
        else:
            self._expect(place.inside(f"keys of {place.text}", ("keys", None)), keys_of(value))
            self._items(place, "item", _items_of(value), depth, lightning)

    def _configuration(self, place: Place, value: Any, depth: int) -> None:
        """Note a configuration of OmegaConf, which keeps each value in a node of its own."""
        content, inside = vars(value)["_content"], ("vars", "_content")
        if not isinstance(content, (dict, list)):
            self._note(place.inside(place.text, inside), content, depth)
            return
        self._expect(place.inside(f"keys of {place.text}", inside, ("keys", None)), keys_of(content))
        for key, node in _items_of(content):
            steps: list[Step] = [inside, ("item", key)]
            if "_val" in vars(node):
                steps.append(("vars", "_val"))
            self._note(place.inside(f"{place.text}.{key}", *steps), vars(node).get("_val", node), depth + 1)

    def _items(self, place: Place, kind: str, items: Iterable[tuple[Any, Any]], depth: int, lightning: bool) -> None:
        for key, value in list(items):
            text = f"{place.text}[{key!r}]" if kind == "item" else f"{place.text}.{key}"
            self._note(place.inside(text, (kind, key)), value, depth + 1, lightning)

    def _object(self, place: Place, value: Any, lightning: bool) -> None:
        """Note an object of a Python class; of its attributes, those that are read count."""
        if id(value) in self._known:
            return
        kind = type(value)
        self._expect(place, Typed(kind))
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
            return self._of_object(thing, place, name, self._quietly(original, thing, name), True)

        own = kind.__dict__.get("__getattribute__", MISSING)
        patched: Any = kind
        try:
            patched.__getattribute__ = read
        except TypeError:  # a class written in C
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
                return value  # the attributes that the property reads count instead
            if isinstance(value, _CALLABLE):
                return value
        self._note(place.inside(text, step), value, lightning=lightning)
        return value


def _refuse_object(text: str, value: Any) -> None:
    """Refuse open files, and optimizers and schedulers that the code keeps itself: their state changes unseen."""
    if isinstance(value, io.IOBase) or type(value).__module__ == "_csv":
        raise CaptureError(
            f"the step uses {text}, an open file. A recorded step does not run this Python again: write to it in a hook "
            "(on_train_batch_end), or log the values."
        )
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        kind = type(value).__name__
        raise CaptureError(
            f"the step uses {text}, an object of the class {kind}. A recorded step does not run this Python again: use "
            "it in a hook (on_train_batch_end), or read its numbers by self.optimizers() and self.lr_schedulers()."
        )


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a dictionary or a sequence; methods of subclasses are not called."""
    return dict.items(value) if isinstance(value, dict) else enumerate(tuple(value))


def _has_no_numbers(value: Any) -> bool:
    """Return whether a container holds only texts, flags and functions: none of its items can become an input."""
    items = [item for _, item in _items_of(value)]
    return bool(items) and all(
        isinstance(item, _CALLABLE) or (is_plain_value(item) and not is_number(item)) for item in items
    )


@contextmanager
def _math_on_numbers() -> Iterator[None]:
    """Let functions of `math` accept tracked numbers inside the context; their results are tracked, too."""
    originals = {name: getattr(math, name) for name in _MATH}

    def tracking(function: Any) -> Any:
        def call(*args: Any) -> Any:
            if any(symbols.is_followed(argument) for argument in args):
                return symbols.derive(function, *args)
            return function(*args)

        return call

    with ExitStack() as stack:
        for name, function in originals.items():
            setattr(math, name, tracking(function))
            stack.callback(setattr, math, name, function)
        yield
