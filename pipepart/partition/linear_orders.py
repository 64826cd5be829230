"""Linear orders of the units, and the prefixes of one order as downsets for the search."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from pipepart.partition.bottleneck import Table
from pipepart.partition.device_orders import Place
from pipepart.partition.unit_costs import Ints, UnitCosts

__all__ = ["LinearStates", "linear_orders"]

_LOOK = 64


class LinearStates:
    """The prefixes of a linear order: state ``i`` holds its first ``i`` units, and every chunk is a slice of the order.

    The traffic of all slices at once is a sum of rectangles. A tensor with neighbouring pins at places ``q < r`` is
    received by the slice ``[i, j)`` if ``q < i <= r < j``; one whose pins span ``q .. r`` is sent by it if
    ``i <= q < j <= r``. Rectangles are added by their corners, then summed along both axes.
    """

    def __init__(self, costs: UnitCosts, order: Sequence[int], *, complete: bool = False) -> None:
        self.costs = costs
        self.order = np.array(order, dtype=np.int64)
        self.complete = complete
        self.sums = costs.amounts.changed(lambda rows: np.pad(rows[:, self.order].cumsum(axis=1), ((0, 0), (1, 0))))
        self.work: Ints = self.sums.least
        self.tables: dict[object, Table] = {}
        place = np.empty(costs.units, dtype=np.int64)
        place[self.order] = np.arange(costs.units)
        low, high, tensor, first, last = [], [], [], [], []
        for index, pins in enumerate(costs.pins):
            spots = sorted(int(place[pin]) for pin in pins)
            low.extend(spots[:-1])
            high.extend(spots[1:])
            tensor.extend([index] * (len(spots) - 1))
            first.append(spots[0])
            last.append(spots[-1])
        self._low, self._high, self._tensor = (np.array(v, dtype=np.int64) for v in (low, high, tensor))
        self._first, self._last = np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)

    def members(self, state: int) -> Ints:
        """Units of a prefix."""
        return self.order[:state]

    def cut_costs(self) -> Ints:
        """Bytes that cross the border of each prefix."""
        change = np.zeros(self.costs.units + 2, dtype=np.int64)
        np.add.at(change, self._first + 1, self.costs.moved)
        np.subtract.at(change, self._last + 1, self.costs.moved)
        return np.cumsum(change)[: self.costs.units + 1]

    def loads(
        self, sources: Ints, targets: Ints, place: Place, limit: int, *, traffic: bool = True
    ) -> tuple[Ints, Ints]:
        """Load of every slice from a source to a target, and its traffic if that is asked for."""
        costs = self.costs
        zero = np.zeros((len(sources), len(targets)), dtype=np.int64)
        received = self.received(sources, targets, costs.received) if costs.recomputes else zero
        comm = zero
        if place.link_in >= 0:
            comm = comm + self.received(sources, targets, costs.link_ticks[place.link_in])
        if place.link_out >= 0:
            comm = comm + self._sent(sources, targets, costs.link_ticks[place.link_out])
        load = costs.loads(self.sums, sources[:, None], targets[None, :], place, comm, received, limit)
        return load, self.received(sources, targets, costs.moved) if traffic else zero

    def received(self, sources: Ints, targets: Ints, weight: Ints) -> Ints:
        """Weight of the tensors that each slice from a source to a target receives."""
        near = np.flatnonzero((self._high >= sources[0]) & (self._high < targets[-1]))
        low, high, value = self._low[near], self._high[near], weight[self._tensor[near]]
        corners = np.zeros((len(sources) + 1, len(targets) + 1), dtype=np.int64)
        right = np.searchsorted(targets, high, "right")
        np.add.at(corners, (np.searchsorted(sources, low, "right"), right), value)
        np.subtract.at(corners, (np.searchsorted(sources, high, "right"), right), value)
        return corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]

    def _sent(self, sources: Ints, targets: Ints, weight: Ints) -> Ints:
        near = np.flatnonzero((self._first >= sources[0]) & (self._first < targets[-1]) & (self._last >= targets[0]))
        value = weight[near]
        corners = np.zeros((len(sources) + 1, len(targets) + 1), dtype=np.int64)
        below = np.searchsorted(sources, self._first[near], "right")
        left = np.searchsorted(targets, self._first[near], "right")
        right = np.searchsorted(targets, self._last[near], "right")
        none = np.zeros_like(left)
        np.add.at(corners, (none, left), value)
        np.subtract.at(corners, (below, left), value)
        np.subtract.at(corners, (none, right), value)
        np.add.at(corners, (below, right), value)
        return corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]


def linear_orders(costs: UnitCosts) -> list[tuple[str, list[int]]]:
    """Different topological orders with their names, the program order first. All of them respect forced cuts."""
    graph = costs.graph
    last = max(graph.side)
    mirrored_side = [last - side for side in graph.side]
    orders = {
        "program order": list(range(costs.units)),
        "depth first": _depth_first(graph.successors, graph.predecessors, graph.side),
        "depth first from the end": _depth_first(graph.predecessors, graph.successors, mirrored_side)[::-1],
        "least open bytes": _least_open(costs),
    }
    different: dict[tuple[int, ...], str] = {}
    for name, order in orders.items():
        different.setdefault(tuple(order), name)
    return [(name, list(order)) for order, name in different.items()]


def _depth_first(
    successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]], side: Sequence[int]
) -> list[int]:
    """The order that takes the newest ready unit first: it ends a branch before it begins the next one."""
    waiting = [len(before) for before in predecessors]
    ready: list[tuple[int, int, int]] = []
    newest = 0

    def push(unit: int) -> None:
        nonlocal newest
        newest -= 1
        heapq.heappush(ready, (side[unit], newest, unit))

    for unit, count in enumerate(waiting):
        if not count:
            push(unit)
    order = []
    while ready:
        _, _, unit = heapq.heappop(ready)
        order.append(unit)
        for other in reversed(successors[unit]):
            waiting[other] -= 1
            if not waiting[other]:
                push(other)
    return order


def _least_open(costs: UnitCosts) -> list[int]:
    """The order that always takes the unit that opens the fewest bytes, or closes the most."""
    touching, side = costs.touching, costs.graph.side
    size = costs.moved.tolist()
    left = [len(pins) for pins in costs.pins]
    opened = [False] * len(left)
    waiting = [len(before) for before in costs.graph.predecessors]
    ready = [unit for unit, count in enumerate(waiting) if not count]

    def key(unit: int) -> tuple[int, int, int]:
        change = sum((0 if opened[t] else size[t]) - (size[t] if left[t] == 1 else 0) for t in touching[unit])
        return side[unit], change, unit

    order = []
    while ready:
        best = min(ready[:_LOOK], key=key)
        lowest = min(side[unit] for unit in ready)
        if side[best] > lowest:
            best = min(unit for unit in ready if side[unit] == lowest)
        ready.remove(best)
        order.append(best)
        for tensor in touching[best]:
            opened[tensor] = True
            left[tensor] -= 1
        for other in costs.graph.successors[best]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return order
