"""Nested arguments and results as flat lists of leaves, with a readable path for each leaf.

All packages use this tree for batches and results, which are split, moved, shared and merged leaf by leaf. Torch's pytree is
used only for the arguments of torch's own functions. Both agree on containers that are registered with torch; a list of
texts is one leaf here, and dataclasses, batches of graphs and other containers of libraries are opened.

A container is built again from a shell: a copy without its contents. No constructor is called, because it may not fit
(fields that it does not take, arguments without a field, checks that hold only for the whole batch). All other
attributes of the container are kept, and a program may change its container without changing that of its caller.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree

from pipepart.errors import CaptureError

__all__ = [
    "LEAF",
    "Opened",
    "Tree",
    "flatten",
    "in_one_piece",
    "leaf_paths",
    "leaves_of",
    "library_of",
    "map_structure",
    "moved",
    "opened",
    "unflatten",
]

Build = Callable[[list[Any]], Any]
"""Makes a new container around children."""


@dataclass(frozen=True)
class Tree:
    """The structure of a nested value: the type of the container, the keys of its children, and their structures.

    `context` is everything else of the container that affects its behaviour. `build` makes an equal
    container around other children; it does not count when structures are compared.
    """

    type: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    context: Any = None
    build: Build | None = field(default=None, compare=False, repr=False)

    @property
    def leaves(self) -> int:
        """The number of leaves of a value with this structure."""
        return 1 if self.type is None else sum(child.leaves for child in self.children)

    def __str__(self) -> str:
        if self.type is None:
            return "*"
        inner = ", ".join(f"{key!r}: {child}" for key, child in zip(self.keys, self.children))
        return f"{self.type.__name__}({inner})"


LEAF = Tree(None)


def flatten(value: Any) -> tuple[list[Any], Tree]:
    """Return the leaves of `value` from left to right, and its structure."""
    leaves: list[Any] = []

    def walk(item: Any) -> Tree:
        parts = opened(item)
        if parts is None:
            leaves.append(item)
            return LEAF
        return Tree(type(item), parts.keys, tuple(map(walk, parts.children)), parts.context, parts.build)

    return leaves, walk(value)


def unflatten(leaves: Sequence[Any], tree: Tree, recorded: bool = False) -> Any:
    """Return the value of structure `tree` with these leaves. Its containers are new and may be changed.

    With `recorded`, the leaves belong to a run that is recorded, perhaps with another batch than that of the tree.
    """
    rest = iter(leaves)

    def build(part: Tree) -> Any:
        if part.build is None:
            return next(rest)
        made = part.build([build(child) for child in part.children])
        return in_one_piece(made) if recorded else made

    return build(tree)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of `value` from left to right."""
    return flatten(value)[0]


def map_structure(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same structure with `function` applied to each leaf."""
    leaves, tree = flatten(value)
    return unflatten([function(leaf) for leaf in leaves], tree)


def moved(value: Any, device: Any) -> Any:
    """Return the same structure with all tensors on a device."""
    return map_structure(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def leaf_paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Yield one readable path per leaf, such as ``batch['x'][0]``."""
    if tree.type is None:
        yield prefix
        return
    for key, child in zip(tree.keys, tree.children):
        yield from leaf_paths(child, f"{prefix}[{key!r}]")


# ---------------------------------------------------------------- kinds of containers


@dataclass(frozen=True)
class Opened:
    """Keys and children of a container, and the function that makes an equal container around other children."""

    keys: tuple[Any, ...]
    children: list[Any]
    build: Build
    context: Any = None


def library_of(value: Any, package: str, name: str) -> bool:
    """Return whether `value` is of a class of a library that may not be installed."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in type(value).__mro__)


def opened(value: Any) -> Opened | None:
    """Return the contents of a container; None for a leaf."""
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in (int, float, str, bool, type(None)):
        return None
    if kind in (list, tuple):
        if value and all(type(item) is str for item in value):
            return None  # names of the samples: one leaf, whatever their number
        return Opened(tuple(range(len(value))), list(value), kind)
    if kind is torch.Size:
        return Opened(tuple(range(len(value))), list(value), _size)
    if kind in (dict, collections.OrderedDict):
        return Opened(tuple(value), list(value.values()), partial(_mapping, kind, tuple(value)))
    if kind is collections.defaultdict:
        make: Callable[[Any], Any] = partial(kind, value.default_factory)
        return Opened(tuple(value), list(value.values()), partial(_mapping, make, tuple(value)), value.default_factory)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Opened(tuple(value._fields), list(value), kind._make)  # type: ignore[attr-defined]
    if library_of(value, "torch_geometric", "BaseData"):
        return _graph(value)
    if library_of(value, "tensordict", "TensorDictBase"):
        keys = tuple(value.keys())
        build = partial(_tensordict, kind, keys, len(value.batch_size))
        return Opened(keys, [value.get(key) for key in keys], build)
    if isinstance(value, collections.UserDict):  # such as the batches of tokenizers
        build = partial(_user_dict, _shell(value, {"data"}), tuple(value.data))
        return Opened(tuple(value.data), list(value.data.values()), build)
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is not None and not isinstance(value, dict):
        children, context = registered.flatten_fn(value)
        return Opened(tuple(range(len(children))), list(children), partial(_registered, kind, context), context)
    if isinstance(value, dict):  # also the outputs of model libraries, which are both dict and dataclass
        shell = _shell(value, set(map(str, value)))
        return Opened(tuple(value), list(value.values()), partial(_dict_subclass, shell, tuple(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]  # one that the constructor does not take may be unset
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        if library_of(value, "chemprop", "BatchMolGraph"):  # its number of molecules follows from its contents
            held = {name: item for name, item in held.items() if isinstance(item, torch.Tensor)}
        return Opened(tuple(held), list(held.values()), partial(_attributes, _shell(value, set(held)), tuple(held)))
    return None


def _mapping(make: Callable[[Any], Any], keys: tuple[Any, ...], children: list[Any]) -> Any:
    return make(zip(keys, children))


def _size(children: list[Any]) -> Any:
    return torch.Size(children) if all(isinstance(child, int) for child in children) else tuple(children)


def _registered(kind: type, context: Any, children: list[Any]) -> Any:
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


@dataclass(frozen=True)
class _Shell:
    """A container without its contents: its class and its other attributes."""

    kind: Any
    attributes: Mapping[str, Any]

    def copied(self) -> Any:
        made = self.kind.__new__(self.kind)
        for name, value in self.attributes.items():
            object.__setattr__(made, name, copy.copy(value) if type(value) in (list, dict, set) else value)
        return made


def _shell(value: Any, contents: set[str]) -> _Shell:
    attributes = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in contents}
    for name in (slot for kind in type(value).__mro__ for slot in _slots(kind)):
        if name not in contents and hasattr(value, name):
            attributes[name] = getattr(value, name)
    return _Shell(type(value), attributes)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__"))


def _user_dict(shell: _Shell, keys: tuple[Any, ...], children: list[Any]) -> Any:
    made = shell.copied()
    made.data = dict(zip(keys, children))
    return made


def _dict_subclass(shell: _Shell, keys: tuple[Any, ...], children: list[Any]) -> Any:
    made = shell.copied()
    base: Any = collections.OrderedDict if issubclass(shell.kind, collections.OrderedDict) else dict
    for key, child in zip(keys, children):
        base.__setitem__(made, key, child)
        if dataclasses.is_dataclass(shell.kind):
            object.__setattr__(made, key, child)
    return made


def _attributes(shell: _Shell, keys: tuple[str, ...], children: list[Any]) -> Any:
    made = shell.copied()
    for key, child in zip(keys, children):
        object.__setattr__(made, key, child)
    return made


def _tensordict(kind: Any, keys: tuple[str, ...], dims: int, children: list[Any]) -> Any:
    """Return a TensorDict with the batch size of its contents, which may be a part of the opened contents."""
    first = next((item for item in children if hasattr(item, "shape")), None)
    made = kind({}, batch_size=[] if first is None else list(first.shape[:dims]))
    for key, item in zip(keys, children):
        made.set(key, item)
    return made


def _graph(value: Any) -> Opened:
    """Open a graph or a batch of graphs of torch_geometric, which keeps its contents in stores."""
    names, keys, children = [], [], []
    shell = copy.copy(value)
    several = len(list(value.stores)) > 1
    for number, (store, empty) in enumerate(zip(value.stores, shell.stores)):
        for name in list(store.keys()):
            names.append((number, name))
            keys.append(f"{store._key}.{name}" if several else name)
            children.append(store[name])
            empty[name] = None
    return Opened(tuple(keys), children, partial(_filled_graph, shell, names))


def _filled_graph(shell: Any, names: list[tuple[int, str]], children: list[Any]) -> Any:
    """Return a copy of an empty graph with these contents; `names` has the number of the store and the name for each child."""
    made = copy.copy(shell)
    stores = list(made.stores)
    for (store, name), child in zip(names, children):
        stores[store][name] = child
    pointers = [child for (_, name), child in zip(names, children) if name == "ptr"]
    if pointers and hasattr(made, "_num_graphs"):  # it may hold other graphs than the batch that was opened
        made._num_graphs = pointers[0].shape[0] - 1
    return made


class _NotKept(dict):
    """Replaces the table by which a batch of graphs is taken apart: the table of another batch would be wrong."""

    def _refuse(self, *args: Any) -> Any:
        raise CaptureError(
            "the model takes its batch of graphs apart (to_data_list, batch[i]): a recording would keep the boundaries of "
            "the graphs of its example.\n  do: work on the whole batch (x, edge_index, batch), or use the graphs as "
            "they come from the loader"
        )

    __getitem__ = __iter__ = __len__ = keys = items = values = get = __contains__ = _refuse  # type: ignore[assignment]


def in_one_piece(value: Any) -> Any:
    """Return a batch of graphs that can be used as a whole but not taken apart; any other value as it is."""
    if library_of(value, "torch_geometric", "Batch") and hasattr(value, "_slice_dict"):
        value._slice_dict = value._inc_dict = _NotKept()
    return value
