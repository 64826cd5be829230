"""Nested arguments and results as flat lists of leaves, with a readable path for each leaf."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = ["LEAF", "Tree", "flatten", "leaf_paths", "map_structure", "unflatten"]


@dataclass(frozen=True)
class Tree:
    """The shape of a nested value: its container type, the keys of its children, and the children.

    `context` is what the container needs to be built again; containers registered with torch's pytree keep theirs.
    """

    type: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    context: Any = None

    @property
    def leaves(self) -> int:
        """How many leaves a value of this shape has."""
        return 1 if self.type is None else sum(child.leaves for child in self.children)

    def __str__(self) -> str:
        if self.type is None:
            return "*"
        inner = ", ".join(f"{key!r}: {child}" for key, child in zip(self.keys, self.children))
        return f"{self.type.__name__}({inner})"


LEAF = Tree(None)


def _open(value: Any) -> tuple[tuple[Any, ...], list[Any], Any] | None:
    """Keys, children and context of a container, or None for a leaf."""
    kind = type(value)
    if kind in (list, tuple):
        if value and all(type(item) is str for item in value):
            return None  # names of the samples: one leaf, whatever their number
        return tuple(range(len(value))), list(value), None
    if isinstance(value, torch.Tensor) or kind in (int, float, str, bool, type(None)):
        return None
    if kind in (dict, collections.OrderedDict):
        return tuple(value), list(value.values()), None
    if kind is collections.defaultdict:
        return tuple(value), list(value.values()), value.default_factory
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value._fields), list(value), None
    if isinstance(value, collections.UserDict):
        return tuple(value.data), list(value.data.values()), None
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        children, context = registered.flatten_fn(value)
        return tuple(range(len(children))), list(children), context
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        if isinstance(value, collections.OrderedDict):  # the outputs of model libraries: both dict and dataclass
            return tuple(value), list(value.values()), None
        return names, [getattr(value, name) for name in names], None
    return None


def _close(tree: Tree, children: list[Any]) -> Any:
    kind = tree.type
    assert kind is not None
    if kind in (list, tuple):
        return kind(children)
    if kind in (dict, collections.OrderedDict):
        return kind(zip(tree.keys, children))
    if kind is collections.defaultdict:
        return collections.defaultdict(tree.context, zip(tree.keys, children))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*children)
    if issubclass(kind, collections.UserDict):
        return kind(dict(zip(tree.keys, children)))
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        return registered.unflatten_fn(children, tree.context)
    return kind(**dict(zip(tree.keys, children)))


def flatten(value: Any) -> tuple[list[Any], Tree]:
    """The leaves of `value` from left to right, and its shape."""
    leaves: list[Any] = []

    def walk(item: Any) -> Tree:
        parts = _open(item)
        if parts is None:
            leaves.append(item)
            return LEAF
        keys, children, context = parts
        return Tree(type(item), keys, tuple(walk(child) for child in children), context)

    return leaves, walk(value)


def unflatten(leaves: Sequence[Any], tree: Tree) -> Any:
    """The value of shape `tree` with these leaves."""
    rest = iter(leaves)

    def build(part: Tree) -> Any:
        if part.type is None:
            return next(rest)
        return _close(part, [build(child) for child in part.children])

    return build(tree)


def map_structure(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `function` applied to each leaf."""
    leaves, tree = flatten(value)
    return unflatten([function(leaf) for leaf in leaves], tree)


def leaf_paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    """One readable path per leaf, such as ``batch['x'][0]``."""
    if tree.type is None:
        yield prefix
        return
    for key, child in zip(tree.keys, tree.children):
        yield from leaf_paths(child, f"{prefix}[{key!r}]")
