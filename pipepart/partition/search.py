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
from pipepart.partition.table import Table, blocks

__all__ = ["Found", "States", "best_path", "pairs_to_try"]

_MOST_IN_TABLE = 8_000_000
_SQUARE_BITS = 22


class States(Protocol):
    """A set of downsets, sorted by work (and a subset before its supersets): the first is empty, the last is all."""

    work: Ints
    """State -> ticks of its classes on the fastest device."""

    tables: dict[object, Table]
    """Loads that searches before have computed."""

    complete: bool
    """These are all downsets: the best path over them is the best one there is."""

    def loads(
        self, sources: Ints, targets: Ints, position: Position, limit: int, *, traffic: bool = True
    ) -> tuple[Ints, Ints]:
        """Load of the chunk between each source and each target (`NEVER` if above the limit or invalid), and what it
        receives, if that is asked for."""
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

    loads: tuple[int, ...]
    traffic: int
    path: tuple[int, ...]
    """States from the empty one to the full one."""
    positions: tuple[Position, ...]

    @property
    def bottleneck(self) -> int:
        """The largest load."""
        return max(self.loads)


@dataclass
class _Front:
    index: Ints
    value: Ints
    parent_node: Ints
    parent: Ints


def best_path(
    states: States, route: Route, limit: int, *, goal: str = "bottleneck", widest: int = 1 << 40
) -> Found | None:
    """The best path without any chunk above ``limit`` ticks.

    ``goal``: the smallest ``bottleneck``, the least ``traffic``, or the best ``balance`` (least sum of squared loads).
    ``None`` proves that there is none (unless windows were thinned to ``widest`` states).
    """
    work = states.work
    tables = _shared_tables(states, route, limit)
    fronts: list[_Front] = [_empty() for _ in route.nodes]
    fronts[0] = _Front(*(np.zeros(1, np.int64) for _ in range(4)))
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
        thin = len(targets) > widest
        if thin:
            targets = _thin(targets, states.cut_costs(), widest)
        merged = _empty()
        for before, position in node.before:
            front = fronts[before]
            if not len(front.index) or not len(targets):
                continue
            table = tables.get(position.terms)
            if table is not None and not thin and route.nodes[before].before and node.left > 0:
                window = int(targets[0]), int(targets[-1]) + 1
                step = _step_by_table(table, len(work), front, window, limit, before, goal)
            else:
                step = _step(states, front, targets, position, limit, before, goal)
            merged = _merge(merged, step)
        fronts[number] = merged
    best: tuple[int, int, int] | None = None
    for number, node in enumerate(route.nodes):
        if node.final:
            at = np.flatnonzero(fronts[number].index == last)
            if len(at) and (best is None or int(fronts[number].value[at[0]]) < best[0]):
                best = (int(fronts[number].value[at[0]]), number, int(at[0]))
    if best is None:
        return None
    return _trace(states, route, fronts, best[1], best[2])


def pairs_to_try(states: States, route: Route, limit: int) -> int:
    """How many chunks the search would have to look at under a limit, at most."""
    windows = [_window(states.work, node, limit) for node in route.nodes]
    seen: dict[object, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for node, window in zip(route.nodes, windows):
        for before, position in node.before:
            seen.setdefault(position.terms, []).append((windows[before], window))
    total = 0
    for uses in seen.values():
        each = sum(_pairs(states.work, *use, limit) for use in uses)
        sources = min(use[0][0] for use in uses), max(use[0][1] for use in uses)
        targets = min(use[1][0] for use in uses), max(use[1][1] for use in uses)
        total += min(each, 2 * _pairs(states.work, sources, targets, limit))
    return total


def _pairs(work: Ints, sources: tuple[int, int], targets: tuple[int, int], limit: int) -> int:
    """Pairs of a source and a target with at most ``limit`` work between them."""
    source, target = work[slice(*sources)], work[slice(*targets)]
    touched = np.searchsorted(source, target, "right") - np.searchsorted(source, target - limit, "left")
    return int(np.maximum(touched, 0).sum())


def _window(work: Ints, node: Node, limit: int) -> tuple[int, int]:
    """The range of states with a plausible amount of work at a node."""
    total = int(work[-1])
    slack = 1 + total * 1e-12
    low = int(np.searchsorted(work, total - node.left * limit - slack, "left"))
    high = int(np.searchsorted(work, node.used * limit + slack, "right"))
    return low, high


def _empty() -> _Front:
    return _Front(*(np.zeros(0, np.int64) for _ in range(4)))


def _step(states: States, front: _Front, targets: Ints, position: Position, limit: int, node: int, goal: str) -> _Front:
    """One more chunk: the best way to each target, in blocks of bounded size."""
    reach, value, parent = [], [], []
    for first, upto, start, end in blocks(states.work, front.index, targets, limit):
        block = targets[start:end]
        load, traffic = states.loads(front.index[first:upto], block, position, limit, traffic=goal == "traffic")
        cost = _cost(front.value[first:upto, None], load, traffic, limit, goal)
        choice = cost.argmin(axis=0)
        best = cost[choice, np.arange(len(block))]
        good = best < NEVER
        reach.append(block[good])
        value.append(best[good])
        parent.append(choice[good] + first)
    if not reach:
        return _empty()
    index = np.concatenate(reach)
    return _Front(index, np.concatenate(value), np.full(len(index), node, np.int64), np.concatenate(parent))


def _cost(value: Ints, load: Ints, traffic: Ints, limit: int, goal: str) -> Ints:
    """What a path costs with one more chunk; `NEVER` where the chunk is above the limit."""
    if goal == "bottleneck":
        cost = np.maximum(value, load)
    elif goal == "traffic":
        cost = value + traffic
    else:
        part = np.minimum(load, limit) // max(1, limit >> _SQUARE_BITS)
        cost = value + part * part
    return np.where(load <= limit, np.minimum(cost, NEVER), NEVER)


def _shared_tables(states: States, route: Route, limit: int) -> dict[object, Table]:
    """Tables for positions that come back at many nodes over the same states, where that saves work."""
    users: dict[object, list[tuple[tuple[int, int], tuple[int, int], Position]]] = {}
    for node in route.nodes:
        for before, position in node.before:
            if route.nodes[before].before and node.left > 0:
                windows = _window(states.work, route.nodes[before], limit), _window(states.work, node, limit)
                users.setdefault(position.terms, []).append((*windows, position))
    tables: dict[object, Table] = {}
    for terms, uses in users.items():
        sources = min(use[0][0] for use in uses), max(use[0][1] for use in uses)
        targets = min(use[1][0] for use in uses), max(use[1][1] for use in uses)
        known = states.tables.get(terms)
        if known is not None and known.covers(limit, sources, targets):
            tables[terms] = known
            continue
        once = _pairs(states.work, sources, targets, limit)
        each = sum(_pairs(states.work, use[0], use[1], limit) for use in uses)
        if 2 * once <= each and once <= _MOST_IN_TABLE:
            tables[terms] = states.tables[terms] = _table(states, sources, targets, uses[0][2], limit)
    return tables


def _table(states: States, sources: tuple[int, int], targets: tuple[int, int], position: Position, limit: int) -> Table:
    """All chunks from a range of states to another one."""
    froms, tos = np.arange(*sources, dtype=np.int64), np.arange(*targets, dtype=np.int64)
    columns: list[list[Ints]] = [[], [], [], []]
    for first, upto, start, end in blocks(states.work, froms, tos, limit):
        load, traffic = states.loads(froms[first:upto], tos[start:end], position, limit)
        column, row = np.nonzero((load <= limit).T)
        for values, part in zip(columns, (froms[first:upto][row], tos[start:end][column], load.T, traffic.T)):
            values.append(part if part.ndim == 1 else part[column, row])
    source, target, load, traffic = (np.concatenate(v) if v else np.zeros(0, np.int64) for v in columns)
    return Table(limit, sources, targets, source, target, load, traffic)


def _step_by_table(
    table: Table, states: int, front: _Front, window: tuple[int, int], limit: int, node: int, goal: str
) -> _Front:
    """One more chunk, with loads that are known already."""
    first, last = np.searchsorted(table.target, window, "left")
    source, target, load = table.source[first:last], table.target[first:last], table.load[first:last]
    value = np.full(states, NEVER, dtype=np.int64)
    value[front.index] = front.value
    cost = _cost(value[source], load, table.traffic[first:last], limit, goal)
    usable = np.flatnonzero(cost < NEVER)
    if not len(usable):
        return _empty()
    source, target, cost = source[usable], target[usable], cost[usable]
    starts = np.flatnonzero(np.concatenate((np.ones(1, bool), target[1:] != target[:-1])))
    sizes = np.diff(np.append(starts, len(target)))
    best = np.minimum.reduceat(cost, starts)
    hits = np.flatnonzero(cost == np.repeat(best, sizes))
    group = np.repeat(np.arange(len(starts)), sizes)[hits]
    chosen = hits[np.concatenate((np.ones(1, bool), group[1:] != group[:-1]))]
    place = np.zeros(states, dtype=np.int64)
    place[front.index] = np.arange(len(front.index))
    return _Front(target[starts], best, np.full(len(starts), node, np.int64), place[source[chosen]])


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


def _trace(states: States, route: Route, fronts: list[_Front], node: int, at: int) -> Found:
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
    loads, traffic = [], 0
    for source, target, position in zip(path, path[1:], positions):
        load, moved = states.loads(np.array([source]), np.array([target]), position, NEVER)
        loads.append(int(load[0, 0]))
        traffic += int(moved[0, 0])
    return Found(tuple(loads), traffic, tuple(path), tuple(positions))
