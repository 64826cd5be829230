"""Containers of every kind: what is inside of them, and how one is built again around other contents.

A container is built again from a shell: a copy without its contents. No constructor is called that may not fit (fields
that it does not take, arguments that are no fields, checks that hold for the whole only). So all else that a container
carries is there again, and a program may change its container without changing that of its caller.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from pipepart.errors import CaptureError

__all__ = ["Opened", "closed", "in_one_piece", "library_of", "opened"]


@dataclass(frozen=True)
class Opened:
    """Keys and children of a container, what else decides its meaning, and its shell."""

    keys: tuple[Any, ...]
    children: list[Any]
    context: Any = None
    shell: Any = None


def library_of(value: Any, package: str, name: str) -> bool:
    """Whether `value` is of a class of a library that may not be installed."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in type(value).__mro__)


def opened(value: Any) -> Opened | None:
    """What is inside of a container; None for a leaf."""
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in (int, float, str, bool, type(None)):
        return None
    if kind in (list, tuple):
        if value and all(type(item) is str for item in value):
            return None  # names of the samples: one leaf, whatever their number
        return Opened(tuple(range(len(value))), list(value))
    if kind in (dict, collections.OrderedDict):
        return Opened(tuple(value), list(value.values()))
    if kind is collections.defaultdict:
        return Opened(tuple(value), list(value.values()), value.default_factory, value.default_factory)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Opened(tuple(value._fields), list(value))
    if library_of(value, "torch_geometric", "BaseData"):
        return _graph(value)
    if library_of(value, "tensordict", "TensorDictBase"):
        keys = tuple(value.keys())
        return Opened(keys, [value.get(key) for key in keys], None, len(value.batch_size))
    if isinstance(value, collections.UserDict):  # such as the batches of tokenizers
        return Opened(tuple(value.data), list(value.data.values()), None, _shell(value, {"data"}))
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is not None and not isinstance(value, dict):
        children, context = registered.flatten_fn(value)
        return Opened(tuple(range(len(children))), list(children), context, context)
    if isinstance(value, dict):  # also the outputs of model libraries, which are both dict and dataclass
        return Opened(tuple(value), list(value.values()), None, _shell(value, set(map(str, value))))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in _set_fields(value)}
        if library_of(value, "chemprop", "BatchMolGraph"):  # its number of molecules follows from its contents
            held = {name: item for name, item in held.items() if isinstance(item, torch.Tensor)}
        return Opened(tuple(held), list(held.values()), None, _shell(value, set(held)))
    return None


def closed(kind: type, keys: tuple[Any, ...], children: list[Any], shell: Any) -> Any:
    """A new container of this kind around these children."""
    if kind in (list, tuple):
        return kind(children)
    if kind in (dict, collections.OrderedDict):
        return kind(zip(keys, children))
    if kind is collections.defaultdict:
        return collections.defaultdict(shell, zip(keys, children))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind._make(children)  # type: ignore[attr-defined]
    if isinstance(shell, _Graph):
        return shell.filled(children)
    if isinstance(shell, int):
        return _tensordict(kind, dict(zip(keys, children)), shell)
    if issubclass(kind, collections.UserDict):
        made = _copied(shell)
        made.data = dict(zip(keys, children))
        return made
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is not None and not issubclass(kind, dict):
        return registered.unflatten_fn(children, shell)
    made = _copied(shell)
    if issubclass(kind, dict):
        base: Any = collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict
        for key, child in zip(keys, children):
            base.__setitem__(made, key, child)
            if dataclasses.is_dataclass(kind):
                object.__setattr__(made, key, child)
        return made
    for key, child in zip(keys, children):
        object.__setattr__(made, key, child)
    return made


class _NotKept(dict):
    """In place of the table by which a batch of graphs is taken apart: that of another batch would be wrong."""

    def _refuse(self, *args: Any) -> Any:
        raise CaptureError(
            "the model takes its batch of graphs apart (to_data_list, batch[i]): a recording would keep where the graphs "
            "of its example begin and end.\n  do: work on the whole batch (x, edge_index, batch), or use the graphs as "
            "they come from the loader"
        )

    __getitem__ = __iter__ = __len__ = keys = items = values = get = __contains__ = _refuse  # type: ignore[assignment]


def in_one_piece(value: Any) -> Any:
    """A batch of graphs that can be worked on, and not be taken apart; anything else as it is."""
    if library_of(value, "torch_geometric", "Batch") and hasattr(value, "_slice_dict"):
        value._slice_dict = value._inc_dict = _NotKept()
    return value


def _set_fields(value: Any) -> list[Any]:
    """The fields of a dataclass that have a value; one that the constructor does not take may have none yet."""
    return [field for field in dataclasses.fields(value) if hasattr(value, field.name)]


@dataclass(frozen=True)
class _Shell:
    """A container without its contents: its class and the attributes that are no contents."""

    kind: Any
    attributes: Mapping[str, Any]


def _shell(value: Any, contents: set[str]) -> _Shell:
    attributes = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in contents}
    for name in (slot for kind in type(value).__mro__ for slot in _slots(kind)):
        if name not in contents and hasattr(value, name):
            attributes[name] = getattr(value, name)
    return _Shell(type(value), attributes)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__"))


def _copied(shell: _Shell) -> Any:
    made = shell.kind.__new__(shell.kind)
    for name, value in shell.attributes.items():
        object.__setattr__(made, name, copy.copy(value) if type(value) in (list, dict, set) else value)
    return made


def _tensordict(kind: Any, content: dict[str, Any], dims: int) -> Any:
    """A TensorDict whose batch size is that of its contents: it may be a part of the one that was opened."""
    first = next((item for item in content.values() if hasattr(item, "shape")), None)
    made = kind({}, batch_size=[] if first is None else list(first.shape[:dims]))
    for key, item in content.items():
        made.set(key, item)
    return made


@dataclass(frozen=True)
class _Graph:
    """The shell of a graph, or of a batch of graphs: the names of its contents by store, and the object around them."""

    graph: Any
    names: tuple[tuple[int, str], ...]
    """The number of the store and the name in it, for each child."""

    def filled(self, children: list[Any]) -> Any:
        made = copy.copy(self.graph)
        stores = list(made.stores)
        for (store, name), child in zip(self.names, children):
            stores[store][name] = child
        pointers = [child for (_, name), child in zip(self.names, children) if name == "ptr"]
        if pointers and hasattr(made, "_num_graphs"):  # it may hold other graphs than the batch that was opened
            made._num_graphs = pointers[0].shape[0] - 1
        return made


def _graph(value: Any) -> Opened:
    names, keys, children = [], [], []
    shell = copy.copy(value)
    several = len(list(value.stores)) > 1
    for number, (store, empty) in enumerate(zip(value.stores, shell.stores)):
        for name in list(store.keys()):
            names.append((number, name))
            keys.append(f"{store._key}.{name}" if several else name)
            children.append(store[name])
            empty[name] = None
    return Opened(tuple(keys), children, None, _Graph(shell, tuple(names)))
