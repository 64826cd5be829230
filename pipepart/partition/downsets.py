"""Downsets of the graph of units as states for the search: all of them where they are few, or any chosen set.

A chunk is the difference ``J - I`` of two nested downsets. It receives the tensors that cross the border of ``I`` and
have a pin in ``J - I``; it sends the tensors that cross the border of ``J`` and have no pin in ``I``. With ``n(I, x)``
pins of tensor ``x`` in ``I``, both follow from the tensors on the border of ``J`` alone:

    received = border(I) - sum over x on the border of J with 0 < n(I, x) = n(J, x)
    sent     = sum over x on the border of J with n(I, x) = 0

A tensor on the border of ``J`` is on the border of ``I`` too, or has no pin in ``I``, so only borders are stored.

Most downsets of a long model are a full prefix of the units, a few units of the part that is being worked on, and
nothing after it. So downsets are handled in blocks of similar size, and only the units between the shortest full prefix
and the last unit in use are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipepart.partition.bottleneck import Table
from pipepart.partition.device_orders import Place
from pipepart.partition.unit_costs import NEVER, Ints, UnitCosts

__all__ = ["DownsetStates", "all_downsets", "as_mask", "unpack"]

_PAIRS = 1 << 18
_ROWS = 256
_PIECE = 26


def all_downsets(costs: UnitCosts, most: int) -> list[int] | None:
    """Every downset as a bit mask, or ``None`` if there are more than ``most``.

    With forced cuts, only those that a partition can use: inside the downset of each cut, or around it.
    """
    predecessors = [sum(1 << p for p in before) for before in costs.graph.predecessors]
    side = costs.graph.side
    fences = [sum(1 << c for c in range(costs.units) if side[c] < s) for s in range(max(side) + 1)]
    start = sum(1 << c for c in range(costs.units) if not costs.graph.predecessors[c])
    seen = {0}
    found = [0]
    level = [(0, start)]
    while level:
        following: list[tuple[int, int]] = []
        for downset, ready in level:
            rest = ready
            while rest:
                low = rest & -rest
                rest ^= low
                bigger = downset | low
                if bigger in seen:
                    continue
                index = low.bit_length() - 1
                if side[index] and fences[side[index]] & ~downset:
                    continue
                seen.add(bigger)
                if len(seen) > most:
                    return None
                found.append(bigger)
                open_ = ready ^ low
                for successor in costs.graph.successors[index]:
                    if not predecessors[successor] & ~bigger:
                        open_ |= 1 << successor
                following.append((bigger, open_))
        level = following
    return found


class DownsetStates:
    """A set of downsets, and everything that the loads of the chunks between them need.

    Rows (and columns of ``sums``) are downsets, ordered by their work, a subset before its supersets.
    """

    def __init__(self, costs: UnitCosts, downsets: Iterable[int], *, complete: bool) -> None:
        self.costs = costs
        self.complete = complete
        masks = sorted(dict.fromkeys(downsets), key=lambda mask: (mask.bit_count(), mask))
        low = np.array([(~mask & (mask + 1)).bit_length() - 1 for mask in masks], dtype=np.int64)
        high = np.array([mask.bit_length() for mask in masks], dtype=np.int64)
        sums, border, inside = _sums_and_borders(costs, masks, low, high)
        size = np.array([mask.bit_count() for mask in masks], dtype=np.int64)
        rank = np.lexsort((np.arange(len(masks)), size, sums[0]))
        width = (costs.units + 63) // 64
        words = np.frombuffer(b"".join(mask.to_bytes(8 * width, "little") for mask in masks), dtype="<u8")
        self._words = words.reshape(len(masks), width)[rank].astype(np.uint64)
        """(state, word): the units as bits."""
        self._low, self._high = low[rank], high[rank]
        """Length of the longest prefix of the units that a state holds in full; one more than its last unit."""
        self._border, self._inside = border[rank], inside[rank]
        """(state, slot): the tensors that cross the border, and how many of their pins are inside."""
        self.sums = costs.amounts.changed(lambda _: np.ascontiguousarray(sums[:, rank]))
        self.work: Ints = self.sums.least
        self.tables: dict[object, Table] = {}
        self._border_size = (self._border < len(costs.pins)).sum(axis=1)
        self._border_sums: dict[int, Ints] = {}
        self._nothing: Ints = np.zeros(len(costs.pins), dtype=np.int64)
        self._local = np.zeros(len(costs.pins) + 1, dtype=np.int64)

    def members(self, state: int) -> Ints:
        """Units of a state."""
        bits = np.unpackbits(self._words[state].view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self.costs.units])

    def cut_costs(self) -> Ints:
        """Bytes that cross the border of each state."""
        return self._border_sum(self.costs.moved)

    def _border_sum(self, weight: Ints) -> Ints:
        """Weight of the tensors that cross the border of each state, computed once per array of weights."""
        known = self._border_sums.get(id(weight))
        if known is None:
            known = np.append(weight, 0)[self._border].sum(axis=1)
            self._border_sums[id(weight)] = known
        return known

    def loads(
        self, sources: Ints, targets: Ints, place: Place, limit: int, *, traffic: bool = True
    ) -> tuple[Ints, Ints]:
        """Load of the chunk between each source and each target, and its traffic if that is asked for."""
        costs = self.costs
        load = np.full((len(sources), len(targets)), NEVER, dtype=np.int64)
        moved = np.zeros((len(sources), len(targets)) if traffic else (1, 1), dtype=np.int64)
        row, column = self._nested(sources, targets, place, limit)
        weights = [costs.link_ticks[place.link_in] if place.link_in >= 0 else self._nothing]
        weights += [costs.received] if costs.recomputes else []
        weights += [costs.moved] if traffic else []
        borders = [self._border_sum(weight)[sources] for weight in weights]
        padded = [np.append(weight, 0) for weight in weights]
        padded_out = np.append(costs.link_ticks[place.link_out] if place.link_out >= 0 else self._nothing, 0)
        counts = self._counts(sources)
        for begin in range(0, len(row), _PAIRS):
            a, b = row[begin : begin + _PAIRS], column[begin : begin + _PAIRS]
            target = targets[b]
            received = [border[a] for border in borders]
            sent = np.zeros(len(a), dtype=np.int64)
            for slot in range(int(self._border_size[target].max(initial=0))):
                tensor = self._border[target, slot]
                held = counts[self._local[tensor], a]
                passing = (held == self._inside[target, slot]) & (held > 0)
                for total, weight in zip(received, padded):
                    total -= weight[tensor] * passing
                sent += padded_out[tensor] * (held == 0)
            arriving = received[1] if costs.recomputes else sent
            comm = received[0] + sent
            load[a, b] = costs.loads(self.sums, sources[a], target, place, comm, arriving, limit)
            if traffic:
                moved[a, b] = received[-1]
        self._local[:] = 0
        return load, moved

    def _counts(self, sources: Ints) -> Ints:
        """(tensor as `_local` numbers it, source): pins inside; row 0 is for tensors on the border of no source."""
        border = self._border[sources]
        self._local[border] = 1
        used = np.flatnonzero(self._local)
        self._local[used] = np.arange(1, len(used) + 1)
        counts = np.zeros((len(used) + 1, len(sources)), dtype=np.int64)
        counts[self._local[border], np.arange(len(sources))[:, None]] = self._inside[sources]
        return counts

    def _nested(self, sources: Ints, targets: Ints, place: Place, limit: int) -> tuple[Ints, Ints]:
        """Pairs of a source inside a target with at most ``limit`` ticks of compute between them."""
        compute = self.sums.compute[place.kind]
        spent = compute[targets][None, :] - compute[sources][:, None]
        near = (spent <= limit) & (spent >= 0)
        # A source that ends before the full prefix of the target ends is inside; else the bits between decide.
        low, high = self._low[targets], self._high[sources]
        sure = high[:, None] <= low[None, :]
        row, column = np.nonzero(near & ~sure)
        if len(row):
            source, target = sources[row], targets[column]
            outside = np.zeros(len(row), dtype=bool)
            for word in range(int(low[column].min()) // 64, (int(high[row].max()) + 63) // 64):
                outside |= (self._words[source, word] & ~self._words[target, word]) != 0
            near[row[outside], column[outside]] = False
        row, column = np.nonzero(near)
        return row, column


def _sums_and_borders(costs: UnitCosts, masks: Sequence[int], low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """For many downsets: (row, downset) sums of the amounts; (downset, slot) tensors on the border and pins inside.

    Empty slots hold the number of tensors.
    """
    values = costs.amounts.rows
    prefix = np.pad(values.cumsum(axis=1), ((0, 0), (1, 0)))
    pins = _Pins(costs)
    sums = np.zeros((len(values), len(masks)), dtype=np.int64)
    found: list[tuple[Ints, Ints, Ints]] = []
    for begin in range(0, len(masks), _ROWS):
        block = slice(begin, begin + _ROWS)
        first = int(low[block].min())
        last = max(first, int(high[block].max()))
        member = unpack([(mask >> first) & ((1 << (last - first)) - 1) for mask in masks[block]], last - first)
        sums[:, block] = prefix[:, first : first + 1] + _exact_sums(member, values[:, first:last])
        row, tensor, count = pins.crossing(member, first, last)
        found.append((row + begin, tensor, count))
    state, tensor, count = (np.concatenate(parts) for parts in zip(*found))
    sizes = np.bincount(state, minlength=len(masks))
    slot = np.arange(len(state)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    border = np.full((len(masks), int(sizes.max(initial=0))), len(costs.pins), dtype=np.int64)
    inside = np.zeros_like(border)
    border[state, slot] = tensor
    inside[state, slot] = count
    return sums, border, inside


class _Pins:
    """The pins of all tensors in one array, to count those inside of many downsets at once."""

    def __init__(self, costs: UnitCosts) -> None:
        self.sizes = np.array([len(pins) for pins in costs.pins], dtype=np.int64)
        self.flat = np.array([pin for pins in costs.pins for pin in pins], dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.first = np.array([pins[0] for pins in costs.pins], dtype=np.int64)
        self.last = np.array([pins[-1] for pins in costs.pins], dtype=np.int64)

    def crossing(self, member: NDArray[np.bool_], first: int, last: int) -> tuple[Ints, Ints, Ints]:
        """Row, tensor and pins inside for every tensor on a border. Units before ``first`` are inside of all rows."""
        nothing = np.zeros(0, dtype=np.int64)
        # A tensor with all pins before the range is inside of all rows; one with all pins after it is outside.
        touched = np.flatnonzero((self.first < last) & (self.last >= first))
        if not len(touched):
            return nothing, nothing, nothing
        sizes = self.sizes[touched]
        starts = np.cumsum(sizes) - sizes
        spots = np.arange(int(sizes.sum())) - np.repeat(starts - self.starts[touched], sizes)
        pins = self.flat[spots]
        before = np.add.reduceat((pins < first).astype(np.int64), starts)
        local = np.where((pins >= first) & (pins < last), pins - first, last - first)
        padded = np.concatenate((member, np.zeros((len(member), 1), dtype=bool)), axis=1)
        held = np.add.reduceat(padded[:, local].astype(np.int32), starts, axis=1) + before
        row, column = np.nonzero((held > 0) & (held < sizes))
        return row, touched[column], held[row, column].astype(np.int64)


def _exact_sums(member: NDArray[np.bool_], values: Ints) -> Ints:
    """(row of values, state): exact sums over the units of each state.

    The integers are taken apart into pieces of 26 bits, so that a floating-point product adds them without rounding,
    in any order.
    """
    assert member.shape[1] < 1 << _PIECE, "sums of that many pieces would not be exact"
    shifts = (0, _PIECE, 2 * _PIECE)
    pieces = np.concatenate([(values >> shift) & ((1 << _PIECE) - 1) for shift in shifts]).astype(np.float64).T
    product = (member.astype(np.float64) @ pieces).T.astype(np.int64)
    count = len(values)
    total: Ints = sum(
        (product[part * count : (part + 1) * count] << shift for part, shift in enumerate(shifts)),
        np.zeros((count, len(member)), dtype=np.int64),
    )
    return total


def unpack(masks: Sequence[int], n: int) -> NDArray[np.bool_]:
    """Bit masks as rows of booleans."""
    width = (n + 7) // 8
    data = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(data.reshape(len(masks), width), axis=1, bitorder="little")
    return bits[:, :n].astype(bool)


def as_mask(members: Ints) -> int:
    """A downset as a bit mask."""
    flags = np.zeros(int(members.max(initial=0)) + 1, dtype=np.uint8)
    flags[members] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
