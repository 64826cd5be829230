"""Ops that must stay together become one class; the classes form a DAG again, in an order near the program's."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipepart.errors import PartitionError
from pipepart.partition.problem import Problem

__all__ = ["Quotient", "contract", "quotient"]


@dataclass(frozen=True)
class Quotient:
    """Classes of ops, numbered in a topological order, with the edges between them."""

    members: tuple[tuple[int, ...], ...]
    """Class -> its ops."""
    class_of: tuple[int, ...]
    """Op -> its class."""
    successors: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    side: tuple[int, ...]
    """Class -> how many of the forced cuts lie before it."""


def quotient(problem: Problem) -> Quotient:
    """The classes of colocated ops, with the cycles that colocation makes fused, checked against the forced cuts."""
    root = list(range(problem.ops))
    for group in problem.colocated:
        for op in group[1:]:
            _join(root, group[0], op)
    sides = [0] * problem.ops
    for cut in problem.split_at:
        for op in range(cut, problem.ops):
            sides[op] += 1
    result = contract(root, problem.edges, sides)
    for members in result.members:
        if sides[members[0]] != sides[members[-1]]:
            first, last = problem.name(members[0]), problem.name(members[-1])
            cut = next(c for c in problem.split_at if members[0] < c <= members[-1])
            raise PartitionError(
                f"partition: split_at wants a cut before {problem.name(cut)}, but {first} before it and {last} "
                "after it must stay in one chunk: move the cut, or leave it to the search"
            )
    return result


def contract(root: Sequence[int], edges: Iterable[tuple[int, int]], sides: Sequence[int]) -> Quotient:
    """The DAG of the classes of a union-find forest, with its cycles fused into one class each."""
    n = len(root)
    forest = list(root)
    label = [_find(forest, op) for op in range(n)]
    successors: dict[int, set[int]] = {op: set() for op in set(label)}
    for a, b in edges:
        if label[a] != label[b]:
            successors[label[a]].add(label[b])
    for component in _components(successors):
        for other in component[1:]:
            _join(forest, component[0], other)
    label = [_find(forest, op) for op in range(n)]
    members: dict[int, list[int]] = {}
    for op in range(n):
        members.setdefault(label[op], []).append(op)
    after: dict[int, set[int]] = {name: set() for name in members}
    before: dict[int, set[int]] = {name: set() for name in members}
    for a, b in edges:
        if label[a] != label[b]:
            after[label[a]].add(label[b])
            before[label[b]].add(label[a])
    waiting = {name: len(before[name]) for name in members}
    # The last op of a class decides its place: a class that holds a late op cannot be complete before it.
    ready = [(sides[members[name][-1]], members[name][-1], name) for name in members if not waiting[name]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, _, name = heapq.heappop(ready)
        order.append(name)
        for other in after[name]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (sides[members[other][-1]], members[other][-1], other))
    assert len(order) == len(members), "cycles were fused before"
    number = {name: index for index, name in enumerate(order)}
    return Quotient(
        members=tuple(tuple(members[name]) for name in order),
        class_of=tuple(number[label[op]] for op in range(n)),
        successors=tuple(tuple(sorted(number[other] for other in after[name])) for name in order),
        predecessors=tuple(tuple(sorted(number[other] for other in before[name])) for name in order),
        side=tuple(sides[members[name][0]] for name in order),
    )


def _find(root: list[int], op: int) -> int:
    while root[op] != op:
        root[op] = root[root[op]]
        op = root[op]
    return op


def _join(root: list[int], a: int, b: int) -> None:
    low, high = sorted((_find(root, a), _find(root, b)))
    root[high] = low


def _components(successors: dict[int, set[int]]) -> list[list[int]]:
    """Strongly connected components with more than one member (Tarjan's algorithm without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for start in sorted(successors):
        if start in index:
            continue
        work = [(start, iter(sorted(successors[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(sorted(successors[other]))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        other = stack.pop()
                        on_stack.discard(other)
                        component.append(other)
                        if other == node:
                            break
                    if len(component) > 1:
                        found.append(sorted(component))
    return found
