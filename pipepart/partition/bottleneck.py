"""The smallest bottleneck over all paths through a set of states, exactly.

States are downsets of the graph of units (for a linear order: its prefixes). A chunk is the difference of two nested
states. For each node of `DeviceOrders` (the devices used so far) the search holds the best bottleneck with which each
state can be reached. It looks only at states with a plausible amount of work at that node: with a limit ``T`` on the
bottleneck, after ``s`` equal chunks at most ``s * T`` of the work is done and at most ``(p - s) * T`` is left.

    work done   0 ........ T ....... 2T ....... 3T ........ all
    s = 1       [   range    ]
    s = 2                [   range    ]
    s = 3                           [   range    ]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from pipepart.partition.device_orders import DeviceOrders, DevicesUsed, Place
from pipepart.partition.unit_costs import NEVER, Ints

__all__ = ["Found", "States", "best_path", "pairs_to_try"]

Range = tuple[int, int]

_MOST_IN_TABLE = 8_000_000
_SQUARE_BITS = 22
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Table:
    """The chunks with a load of at most ``limit``, sorted by target."""

    limit: int
    sources: Range
    """Range of states that chunks start from."""
    targets: Range
    """Range of states that chunks end at."""
    source: Ints
    target: Ints
    load: Ints
    traffic: Ints

    def covers(self, limit: int, sources: Range, targets: Range) -> bool:
        """Whether the table holds all chunks of a search under this limit between these ranges."""
        return (
            limit <= self.limit
            and self.sources[0] <= sources[0]
            and sources[1] <= self.sources[1]
            and self.targets[0] <= targets[0]
            and targets[1] <= self.targets[1]
        )


class States(Protocol):
    """A set of downsets, sorted by work (and a subset before its supersets): the first is empty, the last is all."""

    work: Ints
    """Ticks of the units of each state on the fastest device."""

    tables: dict[object, Table]
    """Loads that earlier searches have computed."""

    complete: bool
    """Whether these are all downsets, so that the best path over them is optimal."""

    def loads(
        self, sources: Ints, targets: Ints, place: Place, limit: int, *, traffic: bool = True
    ) -> tuple[Ints, Ints]:
        """Load of the chunk between each source and each target, and its traffic if that is asked for.

        A chunk that is above the limit or not allowed has the load `NEVER`.
        """
        ...

    def members(self, state: int) -> Ints:
        """Units of a state."""
        ...

    def cut_costs(self) -> Ints:
        """Bytes that cross the border of each state."""
        ...


@dataclass(frozen=True)
class Found:
    """A path through the states."""

    loads: tuple[int, ...]
    traffic: int
    path: tuple[int, ...]
    """States from the empty one to the full one."""
    places: tuple[Place, ...]

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
    states: States, devices: DeviceOrders, limit: int, *, goal: str = "bottleneck", widest: int = 1 << 40
) -> Found | None:
    """The best path without any chunk above ``limit`` ticks.

    ``goal`` is the smallest ``bottleneck``, the least ``traffic``, or the best ``balance`` (least sum of squared loads).
    ``None`` proves that there is no path, unless ranges were thinned to ``widest`` states.
    """
    work = states.work
    tables = _shared_tables(states, devices, limit)
    fronts: list[_Front] = [_empty() for _ in devices.nodes]
    fronts[0] = _Front(*(np.zeros(1, np.int64) for _ in range(4)))
    last = len(work) - 1
    for number, node in enumerate(devices.nodes):
        if not node.before:
            continue
        low, high = _plausible(work, node, limit)
        targets = np.arange(max(low, 1), high, dtype=np.int64)
        if node.left == 0:
            targets = targets[targets == last]
        elif not node.final:
            targets = targets[targets != last]
        thin = len(targets) > widest
        if thin:
            targets = _thin(targets, states.cut_costs(), widest)
        merged = _empty()
        for before, place in node.before:
            front = fronts[before]
            if not len(front.index) or not len(targets):
                continue
            table = tables.get(place.terms)
            if table is not None and not thin and devices.nodes[before].before and node.left > 0:
                reach = int(targets[0]), int(targets[-1]) + 1
                step = _step_by_table(table, len(work), front, reach, limit, before, goal)
            else:
                step = _step(states, front, targets, place, limit, before, goal)
            merged = _merge(merged, step)
        fronts[number] = merged
    best: tuple[int, int, int] | None = None
    for number, node in enumerate(devices.nodes):
        if node.final:
            at = np.flatnonzero(fronts[number].index == last)
            if len(at) and (best is None or int(fronts[number].value[at[0]]) < best[0]):
                best = (int(fronts[number].value[at[0]]), number, int(at[0]))
    if best is None:
        return None
    return _trace(states, devices, fronts, best[1], best[2])


def pairs_to_try(states: States, devices: DeviceOrders, limit: int) -> int:
    """Upper bound of the number of chunks that the search looks at under a limit."""
    total = 0
    for uses in _uses(states.work, devices, limit).values():
        each = sum(_pairs(states.work, use.sources, use.targets, limit) for use in uses)
        total += min(each, 2 * _pairs(states.work, *_span(uses), limit))
    return total


@dataclass(frozen=True)
class _Use:
    """One use of the loads of a place: a range of states that chunks start from, and one that they end at."""

    sources: Range
    targets: Range
    place: Place
    inner: bool
    """Whether the chunks are neither the first nor the last ones."""


def _uses(work: Ints, devices: DeviceOrders, limit: int) -> dict[object, list[_Use]]:
    """All uses of places, by the terms that their loads depend on."""
    ranges = [_plausible(work, node, limit) for node in devices.nodes]
    uses: dict[object, list[_Use]] = {}
    for node, own in zip(devices.nodes, ranges):
        for before, place in node.before:
            inner = bool(devices.nodes[before].before) and node.left > 0
            uses.setdefault(place.terms, []).append(_Use(ranges[before], own, place, inner))
    return uses


def _span(uses: Sequence[_Use]) -> tuple[Range, Range]:
    """The ranges of sources and of targets that cover all uses."""
    sources, targets = [use.sources for use in uses], [use.targets for use in uses]
    return (
        (min(a for a, _ in sources), max(b for _, b in sources)),
        (min(a for a, _ in targets), max(b for _, b in targets)),
    )


def _pairs(work: Ints, sources: Range, targets: Range, limit: int) -> int:
    """Pairs of a source and a target with at most ``limit`` work between them."""
    source, target = work[slice(*sources)], work[slice(*targets)]
    touched = np.searchsorted(source, target, "right") - np.searchsorted(source, target - limit, "left")
    return int(np.maximum(touched, 0).sum())


def _plausible(work: Ints, node: DevicesUsed, limit: int) -> Range:
    """The range of states with a plausible amount of work at a node."""
    total = int(work[-1])
    slack = 1 + total * 1e-12
    low = int(np.searchsorted(work, total - node.left * limit - slack, "left"))
    high = int(np.searchsorted(work, node.used * limit + slack, "right"))
    return low, high


def _empty() -> _Front:
    return _Front(*(np.zeros(0, np.int64) for _ in range(4)))


def _blocks(work: Ints, sources: Ints, targets: Ints, limit: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of sources and targets, of bounded size, that hold every pair with at most ``limit`` work between."""
    source_work = work[sources]
    start = 0
    while start < len(targets):
        first = int(np.searchsorted(source_work, work[targets[start]] - limit, "left"))
        end = min(len(targets), start + max(1, _BLOCK // max(1, len(sources) - first)))
        upto = int(np.searchsorted(source_work, work[targets[end - 1]], "right"))
        if first < upto:
            yield first, upto, start, end
        start = end


def _step(states: States, front: _Front, targets: Ints, place: Place, limit: int, node: int, goal: str) -> _Front:
    """The best path to each target with one more chunk, in blocks of bounded size."""
    reach, value, parent = [], [], []
    for first, upto, start, end in _blocks(states.work, front.index, targets, limit):
        block = targets[start:end]
        load, traffic = states.loads(front.index[first:upto], block, place, limit, traffic=goal == "traffic")
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
    """Cost of a path with one more chunk; `NEVER` where the chunk is above the limit."""
    if goal == "bottleneck":
        cost = np.maximum(value, load)
    elif goal == "traffic":
        cost = value + traffic
    else:
        part = np.minimum(load, limit) // max(1, limit >> _SQUARE_BITS)
        cost = value + part * part
    return np.where(load <= limit, np.minimum(cost, NEVER), NEVER)


def _shared_tables(states: States, devices: DeviceOrders, limit: int) -> dict[object, Table]:
    """Tables for places that occur at many nodes over the same states, where that saves work."""
    tables: dict[object, Table] = {}
    for terms, every in _uses(states.work, devices, limit).items():
        uses = [use for use in every if use.inner]
        if not uses:
            continue
        sources, targets = _span(uses)
        known = states.tables.get(terms)
        if known is not None and known.covers(limit, sources, targets):
            tables[terms] = known
            continue
        once = _pairs(states.work, sources, targets, limit)
        each = sum(_pairs(states.work, use.sources, use.targets, limit) for use in uses)
        if 2 * once <= each and once <= _MOST_IN_TABLE:
            tables[terms] = states.tables[terms] = _table(states, sources, targets, uses[0].place, limit)
    return tables


def _table(states: States, sources: Range, targets: Range, place: Place, limit: int) -> Table:
    """The table of all chunks from a range of states to another one."""
    froms, tos = np.arange(*sources, dtype=np.int64), np.arange(*targets, dtype=np.int64)
    columns: list[list[Ints]] = [[], [], [], []]
    for first, upto, start, end in _blocks(states.work, froms, tos, limit):
        load, traffic = states.loads(froms[first:upto], tos[start:end], place, limit)
        column, row = np.nonzero((load <= limit).T)
        for values, part in zip(columns, (froms[first:upto][row], tos[start:end][column], load.T, traffic.T)):
            values.append(part if part.ndim == 1 else part[column, row])
    source, target, load, traffic = (np.concatenate(v) if v else np.zeros(0, np.int64) for v in columns)
    return Table(limit, sources, targets, source, target, load, traffic)


def _step_by_table(table: Table, states: int, front: _Front, reach: Range, limit: int, node: int, goal: str) -> _Front:
    """The same as `_step`, with loads from a table."""
    first, last = np.searchsorted(table.target, reach, "left")
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
    """The better one of two paths per state; the first one if they are equal."""
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
    """One state out of each stretch of the range: the one with the least traffic over its border."""
    edges = np.linspace(0, len(targets), widest + 1).astype(np.int64)
    chosen = [a + int(np.argmin(cost[targets[a:b]])) for a, b in pairwise(edges.tolist()) if b > a]
    thin: Ints = targets[np.array(chosen)]
    return thin


def _trace(states: States, devices: DeviceOrders, fronts: list[_Front], node: int, at: int) -> Found:
    path: list[int] = []
    places: list[Place] = []
    while node:
        front = fronts[node]
        path.append(int(front.index[at]))
        before = int(front.parent_node[at])
        places.append(next(p for b, p in devices.nodes[node].before if b == before))
        node, at = before, int(front.parent[at])
    path.append(0)
    path.reverse()
    places.reverse()
    loads, traffic = [], 0
    for source, target, place in zip(path, path[1:], places):
        load, moved = states.loads(np.array([source]), np.array([target]), place, NEVER)
        loads.append(int(load[0, 0]))
        traffic += int(moved[0, 0])
    return Found(tuple(loads), traffic, tuple(path), tuple(places))
