"""Containers that a step may fill. While a step is recorded, they report the values that are put into them.

Covers lists, dicts, sets and their subclasses in `collections`: attributes of the module, of its submodules, of their
classes and of plain objects in them, variables of files and enclosing functions that the step is known to fill, and containers
in containers. Each run of the step gets copies of the real ones.
Values that are put in are effects of the step; values that are read are guards of the recording.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from pipepart.errors import ConfigError
from pipepart.recording.model_state.places import Place
from pipepart.recording.model_state.reachable import OWN_NAMES, is_foreign
from pipepart.recording.recorded_run.ops import is_metric, is_torch_leaf

__all__ = [
    "Path",
    "Touched",
    "Watch",
    "Watched",
    "container_at",
    "is_container",
    "is_plain_object",
    "text_of",
    "watched_containers",
    "wrapped",
]

Path = tuple[tuple[str, Any], ...]
"""Steps from the LightningModule to a container: ("module", path), ("attr", name), ("item", key); or ("variable", place)."""
_DEPTH = 4


class Watch(Protocol):
    """Receiver of the reports of containers."""

    touched: Touched
    variables: Sequence[Place]
    """Variables outside of the module that may hold containers."""

    def put(self, kind: str, path: Path, value: Any, key: Any = None) -> None: ...


class Touched:
    """Containers that a step has filled, and containers that it has read."""

    def __init__(self) -> None:
        self.filled: set[str] = set()
        self.read: set[str] = set()

    def covers(self, place: Place) -> bool:
        """Whether a place is in a container that the step fills and never reads, so that its content does not matter."""
        text = place.text.removeprefix("keys of ")
        return any(
            text.startswith((f"{name}[", f"{name}.", f"{name},")) or (text == name and place.text != text)
            for name in self.filled - self.read
        )


def text_of(path: Path) -> str:
    """A path as code of the user."""
    text = "self"
    for kind, key in path:
        if kind == "variable":
            text = key.text
            continue
        text += f"[{key!r}]" if kind == "item" else f".{key}" if key else ""
    return text


def container_at(module: nn.Module, path: Path) -> Any:
    """The real container at a path."""
    found: Any = module
    for kind, key in path:
        if kind == "variable":
            found = key.read()
            continue
        found = found.get_submodule(key) if kind == "module" else getattr(found, key) if kind == "attr" else found[key]
    return found


@contextmanager
def watched_containers(module: nn.Module, watch: Watch) -> Iterator[None]:
    """Inside, for one run of the step, all containers that the module can reach are replaced by copies that report."""
    undo: list[Callable[[], Any]] = []
    seen: set[int] = set()

    def of_object(path: Path, values: dict[str, Any], depth: int) -> None:
        for name, value in list(values.items()):
            if name in OWN_NAMES or name.startswith("__"):
                continue
            where = (*path, ("attr", name))
            if type(value) in _KINDS:
                values[name] = wrapped(watch, where, value)
                undo.append(partial(values.__setitem__, name, value))
            elif is_plain_object(value) and id(value) not in seen and depth < _DEPTH:
                seen.add(id(value))
                of_object(where, vars(value), depth + 1)

    def of_class(path: Path, kind: Any) -> None:
        for name, value in list(vars(kind).items()):
            if type(value) in _KINDS and not name.startswith("__"):
                setattr(kind, name, wrapped(watch, (*path, ("attr", name)), value))
                undo.append(partial(setattr, kind, name, value))

    for path, part in module.named_modules():
        if is_metric(part) or is_torch_leaf(part):
            continue
        of_object((("module", path),), vars(part), 0)
        for base in type(part).__mro__:
            if id(base) not in seen and not is_foreign(base.__module__) and "_pipepart_original" not in vars(base):
                seen.add(id(base))
                of_class((("module", path),), base)
    for place in watch.variables:
        value = place.read()
        if type(value) in _KINDS and place.write(wrapped(watch, (("variable", place),), value)):
            undo.append(partial(place.write, value))
    try:
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object of the user with attributes of its own."""
    return (
        not isinstance(value, (torch.Tensor, nn.Module, type))
        and isinstance(getattr(value, "__dict__", None), dict)
        and not callable(value)
        and (not is_foreign(type(value).__module__) or type(value).__module__ in ("types", "argparse", "queue"))
    )


def is_container(value: Any) -> bool:
    """Whether a step may fill this container."""
    return type(value) in _KINDS


def wrapped(watch: Watch, path: Path, value: Any, depth: int = 0) -> Any:
    """A copy of a container that reports its changes."""
    kind = _KINDS.get(type(value))
    if kind is None or depth > _DEPTH:
        return value
    if isinstance(value, dict):
        items: Any = {key: wrapped(watch, (*path, ("item", key)), item, depth + 1) for key, item in dict.items(value)}
    else:
        items = [wrapped(watch, (*path, ("item", i)), item, depth + 1) for i, item in enumerate(value)]
    return kind(watch, path, items, value)


def _changing(base: Any, name: str) -> Callable[..., Any]:
    """A method of the base class that changes the content in another way than by filling it."""
    original = getattr(base, name)

    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside = any(isinstance(item, Watched) for item in self.pipepart_contents())
        if kwargs or (inside and name != "clear"):
            raise ConfigError(
                f"the step calls {name} on {text_of(self.path)}"
                + (", which holds other containers" if inside else f" with {', '.join(kwargs)}")
                + ". A recorded step cannot repeat that. Make such a change in a hook."
            )
        if name != "clear":  # what it does depends on the content
            self.watch.touched.read.add(text_of(self.path))
        self._put("call", list(args), name)
        return original(self, *args)

    return change


def _reading(original: Any) -> Callable[..., Any]:
    """A method of the base class that reads the content."""

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.watch.touched.read.add(text_of(self.path))
        return original(self, *args, **kwargs)

    return read


class Watched:
    """A container that reports its changes."""

    _base: Any = list
    _pipepart_original: Any = list

    def __new__(cls, *args: Any) -> Any:
        """A plain container for code that makes one of the same type: ``type(data)(items)``."""
        if args and not isinstance(getattr(args[0], "touched", None), Touched):
            return cls._pipepart_original(*args)
        return cls._base.__new__(cls)

    def __init__(self, watch: Watch, path: Path, items: Any, original: Any) -> None:
        self._base.__init__(self, items)
        self.watch, self.path = watch, path

    def pipepart_items(self) -> Any:
        """The content. Reading it is not reported."""
        return self._base(self._base.__iter__(self))

    def pipepart_contents(self) -> Any:
        """The items, or the values of a dict. Reading them is not reported."""
        return list(self._base.__iter__(self))

    def _put(self, kind: str, value: Any, key: Any = None) -> None:
        self.watch.touched.filled.add(text_of(self.path))
        self.watch.put(kind, self.path, value, key)


class _Sequence(Watched):
    def append(self, value: Any) -> None:
        self._put("append", value)
        self._base.append(self, value)

    def extend(self, values: Any) -> None:
        values = list(values)
        self._put("extend", values)
        self._base.extend(self, values)

    def __iadd__(self, values: Any) -> Any:
        self.extend(values)
        return self


class WatchedList(_Sequence, list):
    _pipepart_original = list


class WatchedDeque(_Sequence, deque):
    _pipepart_original = _base = deque

    def __init__(self, watch: Watch, path: Path, items: Any, original: Any) -> None:
        deque.__init__(self, items, original.maxlen)
        self.watch, self.path = watch, path

    def appendleft(self, value: Any) -> None:
        self._put("appendleft", value)
        deque.appendleft(self, value)


class WatchedSet(Watched, set):
    _pipepart_original = _base = set

    def add(self, value: Any) -> None:
        self._put("add", value)
        set.add(self, value)

    def update(self, *others: Any) -> None:
        for value in set().union(*others):
            self.add(value)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self


class _Mapping(Watched, dict):
    """Knows which of its items this run has put in, and which it has read."""

    _base = dict

    def __init__(self, watch: Watch, path: Path, items: Any, original: Any) -> None:
        super().__init__(watch, path, items, original)
        self._factory = getattr(original, "default_factory", None)
        self._is_counter = isinstance(original, Counter)
        self._own: set[Any] = set()
        self._seen: set[Any] = set()

    def pipepart_items(self) -> Any:
        return {key: dict.__getitem__(self, key) for key in dict.__iter__(self)}

    def pipepart_contents(self) -> Any:
        return list(dict.values(self))

    def __getitem__(self, key: Any) -> Any:
        value = dict.__getitem__(self, key) if dict.__contains__(self, key) else self.__missing__(key)
        if key not in self._own and not isinstance(value, Watched):
            self._read(key)
        return value

    def __missing__(self, key: Any) -> Any:
        if self._is_counter:
            return 0
        if self._factory is None:
            self._read(key)
            raise KeyError(key)
        value = self._factory()
        if type(value) not in _KINDS:
            return value
        self.watch.touched.filled.add(text_of(self.path))
        made = wrapped(self.watch, (*self.path, ("item", key)), value)
        dict.__setitem__(self, key, made)
        return made

    def get(self, key: Any, default: Any = None) -> Any:
        if not dict.__contains__(self, key):
            self._read(key)
            return default
        return self[key]

    def _read(self, key: Any) -> None:
        self._seen.add(key)
        self.watch.touched.read.add(text_of(self.path))

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, Watched) and dict.get(self, key) is value:
            return  # the second half of +=
        if key in self._seen and key not in self._own and isinstance(dict.get(self, key), torch.Tensor):
            raise ConfigError(
                f"the step reads item {key!r} of {text_of(self.path)} and then sets it, as += does, and the item is a tensor "
                "of an earlier step: a recorded step cannot read it. Use a number (loss.item()), a buffer, or a metric of "
                "torchmetrics (SumMetric, MeanMetric)."
            )
        self._own.add(key)
        self._put("setitem", value, key)
        dict.__setitem__(self, key, wrapped(self.watch, (*self.path, ("item", key)), value))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if dict.__contains__(self, key):
            return self[key]
        self._put("setdefault", default, key)
        self._own.add(key)
        made = wrapped(self.watch, (*self.path, ("item", key)), default)
        dict.__setitem__(self, key, made)
        return made

    def update(self, *args: Any, **kwargs: Any) -> None:
        if self._is_counter:  # adds to the items; the sums are not known here
            self._put("count", dict(Counter(*args, **kwargs)))
            return
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def _refuse(self, name: str) -> Any:
        raise ConfigError(
            f"the step calls {name} on {text_of(self.path)}. A recorded step cannot repeat that. Make such a change in a hook."
        )

    def move_to_end(self, key: Any, last: bool = True) -> None:
        self._refuse("move_to_end")

    def subtract(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("subtract")


_KINDS: dict[type, Any] = {list: WatchedList, deque: WatchedDeque, set: WatchedSet}
for _kind in (dict, OrderedDict, defaultdict, Counter):
    _KINDS[_kind] = type(f"Watched{_kind.__name__}", (_Mapping,), {"_pipepart_original": _kind})
_CHANGING = {
    list: ("__setitem__", "__delitem__", "__imul__", "insert", "pop", "remove", "clear", "sort", "reverse"),
    deque: ("__setitem__", "__delitem__", "__imul__", "insert", "pop", "popleft", "remove", "clear", "rotate",
            "reverse", "extendleft"),
    set: ("discard", "remove", "pop", "clear", "difference_update", "intersection_update",
          "symmetric_difference_update", "__iand__", "__isub__", "__ixor__"),
    dict: ("__delitem__", "pop", "popitem", "clear"),
}  # fmt: skip
_READING = ("__iter__", "__len__", "__contains__", "__eq__", "__reversed__", "keys", "values", "items", "copy", "index",
            "count", "__or__", "__and__", "__sub__", "union", "issubset", "__add__")  # fmt: skip


def _install() -> None:
    base: Any
    kind: Any
    for base, kind in ((list, WatchedList), (deque, WatchedDeque), (set, WatchedSet), (dict, _Mapping)):
        for name in _CHANGING[base]:
            if hasattr(base, name):
                setattr(kind, name, _changing(base, name))
        reading = (*_READING, "__getitem__") if base in (list, deque) else _READING
        for name in reading:
            if hasattr(base, name):
                setattr(kind, name, _reading(getattr(base, name)))


_install()
