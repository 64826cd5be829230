"""Nested arguments and results as flat lists of leaves, with a readable path for each leaf.

This is the one tree of all rooms: batches are cut, moved and shared by it, and results are put together by it. How a
container is opened and built again is told by `containers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipepart.recording.inputs import containers

__all__ = ["LEAF", "Tree", "flatten", "leaf_paths", "leaves_of", "map_structure", "moved", "unflatten"]


@dataclass(frozen=True)
class Tree:
    """The shape of a nested value: its container type, the keys of its children, and the children.

    `context` is what else of the container decides what a program does with it; `shell` is the container without its
    children, from which equal ones are built. Two values have one structure whatever their shells.
    """

    type: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    context: Any = None
    shell: Any = field(default=None, compare=False, repr=False)

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


def flatten(value: Any) -> tuple[list[Any], Tree]:
    """The leaves of `value` from left to right, and its shape."""
    leaves: list[Any] = []

    def walk(item: Any) -> Tree:
        parts = containers.opened(item)
        if parts is None:
            leaves.append(item)
            return LEAF
        children = tuple(walk(child) for child in parts.children)
        return Tree(type(item), parts.keys, children, parts.context, parts.shell)

    return leaves, walk(value)


def unflatten(leaves: Sequence[Any], tree: Tree, recorded: bool = False) -> Any:
    """The value of shape `tree` with these leaves; its containers are new ones, which may be changed.

    `recorded`: the leaves are those of a run that is recorded, perhaps of another batch than that of the tree.
    """
    rest = iter(leaves)

    def build(part: Tree) -> Any:
        if part.type is None:
            return next(rest)
        made = containers.closed(part.type, part.keys, [build(child) for child in part.children], part.shell)
        return containers.in_one_piece(made) if recorded else made

    return build(tree)


def leaves_of(value: Any) -> list[Any]:
    """The leaves alone."""
    return flatten(value)[0]


def map_structure(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `function` applied to each leaf."""
    leaves, tree = flatten(value)
    return unflatten([function(leaf) for leaf in leaves], tree)


def moved(value: Any, device: Any) -> Any:
    """The same structure with all tensors on a device."""
    return map_structure(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def leaf_paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    """One readable path per leaf, such as ``batch['x'][0]``."""
    if tree.type is None:
        yield prefix
        return
    for key, child in zip(tree.keys, tree.children):
        yield from leaf_paths(child, f"{prefix}[{key!r}]")
