"""Units: ops that stay in one chunk. The units form a directed acyclic graph, in an order near the program's."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from pipepart.errors import PartitionError
from pipepart.partition.problem import Problem

__all__ = ["UnitGraph", "merge", "unit_graph"]


@dataclass(frozen=True)
class UnitGraph:
    """Units of ops, numbered in a topological order, with the edges between them."""

    members: tuple[tuple[int, ...], ...]
    """Ops of each unit."""
    unit_of: tuple[int, ...]
    """Unit of each op."""
    successors: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    side: tuple[int, ...]
    """Number of forced cuts before each unit."""

    @property
    def edges(self) -> list[tuple[int, int]]:
        """All edges as pairs (source, target)."""
        return [(a, b) for a, after in enumerate(self.successors) for b in after]

    def sums(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Sums over the ops of each unit."""
        return np.bincount(self.unit_of, weights=values, minlength=len(self.members)).astype(np.float64)

    def require(self, chunks: int, hint: str = "") -> None:
        """Raise an error if there are fewer units than chunks."""
        count = len(self.members)
        if count < chunks:
            raise PartitionError(
                f"partition: {chunks} chunks were requested, but the model can be cut into {count} at most{hint}: "
                f"use stages and chunks with a product of {count} or less"
            )


@lru_cache(maxsize=4)
def unit_graph(problem: Problem) -> UnitGraph:
    """The units of colocated ops. Raises an error where a forced cut would divide a unit."""
    sides = [0] * problem.ops
    for cut in problem.split_at:
        for op in range(cut, problem.ops):
            sides[op] += 1
    graph = merge(problem.edges, problem.colocated, sides)
    for members in graph.members:
        if sides[members[0]] != sides[members[-1]]:
            first, last = problem.name(members[0]), problem.name(members[-1])
            cut = next(c for c in problem.split_at if members[0] < c <= members[-1])
            raise PartitionError(
                f"partition: split_at requires a cut before {problem.name(cut)}, but {first} before it and {last} "
                "after it must stay in one chunk: move the cut, or leave it to the search"
            )
    return graph


def merge(edges: Sequence[tuple[int, int]], together: Iterable[Sequence[int]], sides: Sequence[int]) -> UnitGraph:
    """The acyclic graph in which each group of nodes, and each cycle that a group closes, is one unit.

    The order is computed here: `networkx.condensation` with `networkx.lexicographical_topological_sort` took two to
    seven times as long at 10,000 ops. Cycles are rare, so `networkx` looks for them only if the order fails.
    """
    same = nx.utils.UnionFind(range(len(sides)))
    for group in together:
        same.union(*group)
    while True:
        label = [same[node] for node in range(len(sides))]
        members: dict[int, list[int]] = {}
        for node, name in enumerate(label):
            members.setdefault(name, []).append(node)
        after: dict[int, set[int]] = {name: set() for name in members}
        before: dict[int, set[int]] = {name: set() for name in members}
        for a, b in edges:
            if label[a] != label[b]:
                after[label[a]].add(label[b])
                before[label[b]].add(label[a])
        # The last member of a unit decides its place: a unit that holds a late op cannot be complete before it.
        order = _topological(after, before, {name: (sides[mine[-1]], mine[-1]) for name, mine in members.items()})
        if len(order) == len(members):
            break
        for cycle in nx.strongly_connected_components(nx.from_dict_of_lists(after, create_using=nx.DiGraph)):
            same.union(*cycle)
    number = {name: index for index, name in enumerate(order)}
    return UnitGraph(
        members=tuple(tuple(members[name]) for name in order),
        unit_of=tuple(number[name] for name in label),
        successors=tuple(tuple(sorted(number[other] for other in after[name])) for name in order),
        predecessors=tuple(tuple(sorted(number[other] for other in before[name])) for name in order),
        side=tuple(sides[members[name][0]] for name in order),
    )


def _topological(
    after: Mapping[int, Iterable[int]], before: Mapping[int, Collection[int]], key: Mapping[int, tuple[int, int]]
) -> list[int]:
    """Units in a topological order, the smallest key first; units on or behind a cycle are left out."""
    waiting = {name: len(sources) for name, sources in before.items()}
    ready = [(key[name], name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for other in after[name]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (key[other], other))
    return order
