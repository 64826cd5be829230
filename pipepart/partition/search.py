"""The smallest bottleneck over all ways through a set of states, exactly.

States are downsets of the DAG (for a linear order: its prefixes). A chunk is the difference of two nested states. For
each node of the route (how many chunks are done) the search holds the best bottleneck with which each state can be
reached. Only states with a plausible amount of work at that node are looked at: with a limit ``T`` on the bottleneck,
after ``s`` equal chunks at most ``s * T`` of the work is done and at most ``(p - s) * T`` is left.

    work done   0 ........ T ....... 2T ....... 3T ........ all
    s = 1       [   window   ]
    s = 2                [   window   ]
    s = 3                           [   window   ]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from pipepart.partition.instance import NEVER, Ints, Position
from pipepart.partition.route import Node, Route

__all__ = ["Found", "States", "best_path", "pairs_to_try"]

_BLOCK = 1 << 20


class States(Protocol):
    """A set of downsets, sorted by work (and a subset before its supersets): the first is empty, the last is all."""

    work: Ints
    """State -> ticks of its classes on the fastest device."""

    complete: bool
    """These are all downsets: the best path over them is the best one there is."""

    def loads(self, sources: Ints, targets: Ints, position: Position, limit: int) -> tuple[Ints, Ints]:
        """Load and traffic of the chunk between each source and each target; `NEVER` if above the limit or invalid."""
        ...

    def members(self, state: int) -> Ints:
        """The classes of a state."""
        ...

    def cut_costs(self) -> Ints:
        """State -> bytes that cross its border."""
        ...


@dataclass(frozen=True)
class Found:
    """A way through the states."""

    bottleneck: int
    traffic: int
    path: tuple[int, ...]
    """States from the empty one to the full one."""
    positions: tuple[Position, ...]
    thinned: bool
    """Some states were left out to save time: not proved to be the best over the states."""


@dataclass
class _Front:
    index: Ints
    value: Ints
    parent_node: Ints
    parent: Ints


def best_path(
    states: States, route: Route, limit: int, *, least_traffic: bool = False, widest: int = 1 << 40
) -> Found | None:
    """The path with the smallest bottleneck of at most ``limit`` ticks, or with the least traffic under that limit.

    ``None`` proves that there is none (unless windows were thinned to ``widest`` states).
    """
    work = states.work
    fronts: list[_Front] = [_empty() for _ in route.nodes]
    fronts[0] = _Front(*(np.zeros(1, np.int64) for _ in range(4)))
    thinned = False
    last = len(work) - 1
    for number, node in enumerate(route.nodes):
        if not node.before:
            continue
        low, high = _window(work, node, limit)
        targets = np.arange(max(low, 1), high, dtype=np.int64)
        if node.left == 0:
            targets = targets[targets == last]
        elif not node.final:
            targets = targets[targets != last]
        if len(targets) > widest:
            targets = _thin(targets, states.cut_costs(), widest)
            thinned = True
        merged = _empty()
        for before, position in node.before:
            front = fronts[before]
            if len(front.index) and len(targets):
                merged = _merge(merged, _step(states, front, targets, position, limit, before, least_traffic))
        fronts[number] = merged
    best: tuple[int, int, int] | None = None
    for number, node in enumerate(route.nodes):
        if node.final:
            at = np.flatnonzero(fronts[number].index == last)
            if len(at) and (best is None or int(fronts[number].value[at[0]]) < best[0]):
                best = (int(fronts[number].value[at[0]]), number, int(at[0]))
    if best is None:
        return None
    return _trace(states, route, fronts, best[1], best[2], thinned)


def pairs_to_try(states: States, route: Route, limit: int) -> int:
    """How many chunks the search would have to look at under a limit, at most."""
    work = states.work
    pairs = 0
    for node in route.nodes:
        low, high = _window(work, node, limit)
        target = work[low:high]
        for before, _ in node.before:
            first, last = _window(work, route.nodes[before], limit)
            source = work[first:last]
            touched = np.searchsorted(source, target, "right") - np.searchsorted(source, target - limit, "left")
            pairs += int(np.maximum(touched, 0).sum())
    return pairs


def _window(work: Ints, node: Node, limit: int) -> tuple[int, int]:
    """The range of states with a plausible amount of work at a node."""
    total = int(work[-1])
    slack = 1 + total * 1e-12
    low = int(np.searchsorted(work, total - node.left * limit - slack, "left"))
    high = int(np.searchsorted(work, node.used * limit + slack, "right"))
    return low, high


def _empty() -> _Front:
    return _Front(*(np.zeros(0, np.int64) for _ in range(4)))


def _step(
    states: States, front: _Front, targets: Ints, position: Position, limit: int, node: int, least_traffic: bool
) -> _Front:
    """One more chunk: the best way to each target, in blocks of bounded size."""
    work = states.work
    reach, value, parent = [], [], []
    source_work = work[front.index]
    start = 0
    while start < len(targets):
        # As many targets as fit in a block together with the sources whose window touches theirs.
        first = int(np.searchsorted(source_work, work[targets[start]] - limit, "left"))
        end = min(len(targets), start + max(1, _BLOCK // max(1, len(front.index) - first)))
        upto = int(np.searchsorted(source_work, work[targets[end - 1]], "right"))
        block = targets[start:end]
        start = end
        if first >= upto:
            continue
        load, traffic = states.loads(front.index[first:upto], block, position, limit)
        if least_traffic:
            cost = np.where(load <= limit, front.value[first:upto, None] + traffic, NEVER)
        else:
            cost = np.maximum(front.value[first:upto, None], load)
        choice = cost.argmin(axis=0)
        best = cost[choice, np.arange(len(block))]
        good = best < NEVER if least_traffic else best <= limit
        reach.append(block[good])
        value.append(best[good])
        parent.append(choice[good] + first)
    if not reach:
        return _empty()
    index = np.concatenate(reach)
    return _Front(index, np.concatenate(value), np.full(len(index), node, np.int64), np.concatenate(parent))


def _merge(a: _Front, b: _Front) -> _Front:
    """Per state the better one of two ways; the first one if they are equal."""
    if not len(a.index):
        return b
    columns = [np.concatenate(pair) for pair in ((a.index, b.index), (a.value, b.value))]
    origin = np.concatenate((np.zeros(len(a.index), np.int64), np.ones(len(b.index), np.int64)))
    order = np.lexsort((origin, columns[1], columns[0]))
    index = columns[0][order]
    keep = order[np.concatenate((np.ones(1, bool), index[1:] != index[:-1]))]
    node = np.concatenate((a.parent_node, b.parent_node))
    parent = np.concatenate((a.parent, b.parent))
    return _Front(columns[0][keep], columns[1][keep], node[keep], parent[keep])


def _thin(targets: Ints, cost: Ints, widest: int) -> Ints:
    """One state out of each stretch of the window: the one with the least traffic over its border."""
    edges = np.linspace(0, len(targets), widest + 1).astype(np.int64)
    chosen = [a + int(np.argmin(cost[targets[a:b]])) for a, b in pairwise(edges.tolist()) if b > a]
    thin: Ints = targets[np.array(chosen)]
    return thin


def _trace(states: States, route: Route, fronts: list[_Front], node: int, at: int, thinned: bool) -> Found:
    path: list[int] = []
    positions: list[Position] = []
    while node:
        front = fronts[node]
        path.append(int(front.index[at]))
        before = int(front.parent_node[at])
        positions.append(next(p for b, p in route.nodes[node].before if b == before))
        node, at = before, int(front.parent[at])
    path.append(0)
    path.reverse()
    positions.reverse()
    bottleneck = traffic = 0
    for source, target, position in zip(path, path[1:], positions):
        load, moved = states.loads(np.array([source]), np.array([target]), position, NEVER)
        bottleneck = max(bottleneck, int(load[0, 0]))
        traffic += int(moved[0, 0])
    return Found(bottleneck, traffic, tuple(path), tuple(positions), thinned)
