"""The prefixes of one linear order of the classes, as states for the search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipepart.partition.chunkload import Prefixes, chunk_loads
from pipepart.partition.instance import Instance, Ints, Position
from pipepart.partition.table import Table

__all__ = ["LinearStates"]


class LinearStates:
    """Prefix ``i`` holds the first ``i`` classes of the order; every chunk is a slice of the order.

    The traffic of all slices at once is a sum of rectangles. A tensor with neighbouring pins at places ``q < r`` is
    received by the slice ``[i, j)`` if ``q < i <= r < j``; one whose pins span ``q .. r`` is sent by it if
    ``i <= q < j <= r``. Rectangles are added by their corners, then summed along both axes.
    """

    def __init__(self, instance: Instance, order: Sequence[int], *, complete: bool = False) -> None:
        self.instance = instance
        self.order = np.array(order, dtype=np.int64)
        self.complete = complete
        self.prefixes = Prefixes.along(instance, self.order)
        self.work: Ints = self.prefixes.least
        self.tables: dict[object, Table] = {}
        place = np.empty(instance.classes, dtype=np.int64)
        place[self.order] = np.arange(instance.classes)
        low, high, tensor, first, last = [], [], [], [], []
        for index, pins in enumerate(instance.pins):
            spots = sorted(int(place[pin]) for pin in pins)
            low.extend(spots[:-1])
            high.extend(spots[1:])
            tensor.extend([index] * (len(spots) - 1))
            first.append(spots[0])
            last.append(spots[-1])
        self._low, self._high, self._tensor = (np.array(v, dtype=np.int64) for v in (low, high, tensor))
        self._first, self._last = np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)

    def members(self, state: int) -> Ints:
        """The classes of a prefix."""
        return self.order[:state]

    def cut_costs(self) -> Ints:
        """State -> bytes that cross its border."""
        change = np.zeros(self.instance.classes + 2, dtype=np.int64)
        np.add.at(change, self._first + 1, self.instance.moved)
        np.subtract.at(change, self._last + 1, self.instance.moved)
        return np.cumsum(change)[: self.instance.classes + 1]

    def loads(
        self, sources: Ints, targets: Ints, position: Position, limit: int, *, traffic: bool = True
    ) -> tuple[Ints, Ints]:
        """Load of every slice from a source to a target, and its traffic if that is asked for."""
        instance = self.instance
        zero = np.zeros((len(sources), len(targets)), dtype=np.int64)
        received = self._received(sources, targets, instance.received) if instance.recomputes else zero
        comm = zero
        if position.wire_in >= 0:
            comm = comm + self._received(sources, targets, instance.wires[position.wire_in].ticks)
        if position.wire_out >= 0:
            comm = comm + self._sent(sources, targets, instance.wires[position.wire_out].ticks)
        load = chunk_loads(instance, self.prefixes, sources[:, None], targets[None, :], position, comm, received, limit)
        return load, self._received(sources, targets, instance.moved) if traffic else zero

    def _received(self, sources: Ints, targets: Ints, weight: Ints) -> Ints:
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
