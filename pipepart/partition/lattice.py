"""Downsets of the DAG as states for the search: all of them where they are few, or any chosen set.

A chunk is the difference ``J - I`` of two nested downsets. It receives the tensors that cross the border of ``I`` and
have a pin in ``J - I``; it sends the tensors that cross the border of ``J`` and have no pin in ``I``. With ``n(I, x)``
pins of tensor ``x`` in ``I``, both follow from the tensors on the border of ``J`` alone:

    received = border(I) - sum over x on the border of J with 0 < n(I, x) = n(J, x)
    sent     = sum over x on the border of J with n(I, x) = 0

And a tensor on the border of ``J`` is on the border of ``I`` too, or has no pin in ``I``: borders are all there is to
know.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipepart.partition.chunkload import Prefixes, chunk_loads
from pipepart.partition.downsets import bulk
from pipepart.partition.instance import NEVER, Instance, Ints, Position
from pipepart.partition.table import Table

__all__ = ["LatticeStates"]

_PAIRS = 1 << 18


class LatticeStates:
    """A set of downsets with all that the loads of the chunks between them need."""

    def __init__(self, instance: Instance, downsets: Iterable[int], *, complete: bool) -> None:
        self.instance = instance
        self.complete = complete
        cuts = int(instance.side.max())
        before = [(instance.side < cut).astype(np.int64) for cut in range(1, cuts + 1)]
        single = np.stack((instance.least, instance.counts, instance.state, instance.saved, *before))
        values = np.concatenate((single, instance.compute, instance.extra, instance.forbidden))
        self._downsets = bulk(instance, list(downsets), values)
        sums = self._downsets.sums
        compute, extra, forbidden = np.split(sums[len(single) :], 3)
        sizes = np.array([int(row.sum()) for row in before], dtype=np.int64)
        side = (sums[4 : len(single)] == sizes[:, None]).sum(axis=0)
        start = np.concatenate((np.full(1, -1, dtype=np.int64), sizes))
        self.prefixes = Prefixes(
            least=sums[0],
            counts=sums[1],
            compute=compute,
            extra=extra,
            forbidden=forbidden,
            state=sums[2],
            saved=sums[3],
            side=side,
            border=(start[side] == self._downsets.size).astype(np.int64),
        )
        self.work: Ints = self.prefixes.least
        self.tables: dict[object, Table] = {}
        self._border_size = (self._downsets.border < len(instance.pins)).sum(axis=1)
        self._border_sums: dict[int, Ints] = {}
        self._nothing: Ints = np.zeros(len(instance.pins), dtype=np.int64)
        self._local = np.zeros(len(instance.pins) + 1, dtype=np.int64)

    def members(self, state: int) -> Ints:
        """The classes of a state."""
        bits = np.unpackbits(self._downsets.words[state].view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self.instance.classes])

    def cut_costs(self) -> Ints:
        """State -> bytes that cross its border."""
        return self._border_sum(self.instance.moved)

    def _border_sum(self, weight: Ints) -> Ints:
        """State -> weight of the tensors that cross its border (kept: there are few different weights)."""
        known = self._border_sums.get(id(weight))
        if known is None:
            known = np.append(weight, 0)[self._downsets.border].sum(axis=1)
            self._border_sums[id(weight)] = known
        return known

    def loads(
        self, sources: Ints, targets: Ints, position: Position, limit: int, *, traffic: bool = True
    ) -> tuple[Ints, Ints]:
        """Load of the chunk between each source and each target, and its traffic if that is asked for."""
        instance = self.instance
        load = np.full((len(sources), len(targets)), NEVER, dtype=np.int64)
        moved = np.zeros((len(sources), len(targets)) if traffic else (1, 1), dtype=np.int64)
        row, column = self._nested(sources, targets, position, limit)
        weights = [instance.wires[position.wire_in].ticks if position.wire_in >= 0 else self._nothing]
        weights += [instance.received] if instance.recomputes else []
        weights += [instance.moved] if traffic else []
        borders = [self._border_sum(weight)[sources] for weight in weights]
        padded = [np.append(weight, 0) for weight in weights]
        padded_out = np.append(instance.wires[position.wire_out].ticks if position.wire_out >= 0 else self._nothing, 0)
        counts = self._counts(sources)
        for begin in range(0, len(row), _PAIRS):
            a, b = row[begin : begin + _PAIRS], column[begin : begin + _PAIRS]
            target = targets[b]
            received = [border[a] for border in borders]
            sent = np.zeros(len(a), dtype=np.int64)
            for slot in range(int(self._border_size[target].max(initial=0))):
                tensor = self._downsets.border[target, slot]
                held = counts[self._local[tensor], a]
                passing = (held == self._downsets.inside[target, slot]) & (held > 0)
                for total, weight in zip(received, padded):
                    total -= weight[tensor] * passing
                sent += padded_out[tensor] * (held == 0)
            arriving = received[1] if instance.recomputes else sent
            comm = received[0] + sent
            load[a, b] = chunk_loads(instance, self.prefixes, sources[a], target, position, comm, arriving, limit)
            if traffic:
                moved[a, b] = received[-1]
        self._local[:] = 0
        return load, moved

    def _counts(self, sources: Ints) -> Ints:
        """(tensor as `_local` numbers it, source): pins inside; row 0 is for tensors on the border of no source."""
        border = self._downsets.border[sources]
        self._local[border] = 1
        used = np.flatnonzero(self._local)
        self._local[used] = np.arange(1, len(used) + 1)
        counts = np.zeros((len(used) + 1, len(sources)), dtype=np.int64)
        counts[self._local[border], np.arange(len(sources))[:, None]] = self._downsets.inside[sources]
        return counts

    def _nested(self, sources: Ints, targets: Ints, position: Position, limit: int) -> tuple[Ints, Ints]:
        """The pairs of a source inside a target with not too much compute between them."""
        compute = self.prefixes.compute[position.kind]
        spent = compute[targets][None, :] - compute[sources][:, None]
        near = (spent <= limit) & (spent >= 0)
        # What ends before the full prefix of the other one ends is inside; else the bits between decide.
        low, high = self._downsets.low[targets], self._downsets.high[sources]
        sure = high[:, None] <= low[None, :]
        row, column = np.nonzero(near & ~sure)
        if len(row):
            source, target = sources[row], targets[column]
            outside = np.zeros(len(row), dtype=bool)
            for word in range(int(low[column].min()) // 64, (int(high[row].max()) + 63) // 64):
                outside |= (self._downsets.words[source, word] & ~self._downsets.words[target, word]) != 0
            near[row[outside], column[outside]] = False
        row, column = np.nonzero(near)
        return row, column
