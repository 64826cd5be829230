"""Downsets of the DAG as states for the search: all of them where they are few, or any chosen set.

A chunk is the difference ``J - I`` of two nested downsets. It receives the tensors that cross the border of ``I`` and
have a pin in ``J - I``; it sends the tensors that cross the border of ``J`` and have no pin in ``I``. With ``n(I, x)``
pins of tensor ``x`` in ``I``, both follow from the tensors on the border of ``J`` alone:

    received = border(I) - sum over x on the border of J with 0 < n(I, x) = n(J, x)
    sent     = sum over x on the border of J with n(I, x) = 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipepart.partition.chunkload import Prefixes, chunk_loads
from pipepart.partition.instance import NEVER, Instance, Ints, Position
from pipepart.partition.table import Table

__all__ = ["LatticeStates", "all_downsets"]

_PAIRS = 1 << 18
_ROWS = 256


def all_downsets(instance: Instance, most: int) -> list[int] | None:
    """Every downset as a bit mask, or ``None`` if there are more than ``most``.

    With forced cuts only those that a partition can use: inside a forced downset, or around it.
    """
    predecessors = [sum(1 << p for p in before) for before in instance.predecessors]
    side = instance.side.tolist()
    fences = [sum(1 << c for c in range(instance.classes) if side[c] < s) for s in range(max(side) + 1)]
    start = sum(1 << c for c in range(instance.classes) if not instance.predecessors[c])
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
                for successor in instance.successors[index]:
                    if not predecessors[successor] & ~bigger:
                        open_ |= 1 << successor
                following.append((bigger, open_))
        level = following
    return found


class LatticeStates:
    """A set of downsets with all that the loads of the chunks between them need."""

    def __init__(self, instance: Instance, downsets: Iterable[int], *, complete: bool) -> None:
        self.instance = instance
        self.complete = complete
        n = instance.classes
        masks = list(downsets)
        member = _unpack(masks, n)
        work = _sums(member, instance.least[None])[0]
        size = member.sum(axis=1, dtype=np.int64)
        rank = np.lexsort((np.arange(len(masks)), size, work))
        self._member: NDArray[np.bool_] = member[rank]
        self._words = _pack(self._member)
        member = self._member
        cuts = int(instance.side.max())
        sizes = np.array([int((instance.side < cut).sum()) for cut in range(1, cuts + 1)], dtype=np.int64)
        inside = [member[:, instance.side < cut].sum(axis=1) for cut in range(1, cuts + 1)]
        side = sum((held == full for held, full in zip(inside, sizes)), np.zeros(len(masks), dtype=np.int64))
        start = np.concatenate((np.full(1, -1, dtype=np.int64), sizes))
        single = np.stack((instance.counts, instance.state, instance.saved))
        sums = _sums(member, np.concatenate((single, instance.compute, instance.extra, instance.forbidden)))
        compute, extra, forbidden = np.split(sums[3:], 3)
        self.prefixes = Prefixes(
            least=work[rank],
            counts=sums[0],
            compute=compute,
            extra=extra,
            forbidden=forbidden,
            state=sums[1],
            saved=sums[2],
            side=side,
            border=(start[side] == size[rank]).astype(np.int64),
        )
        self.work: Ints = self.prefixes.least
        self.tables: dict[object, Table] = {}
        self._border_sums: dict[int, Ints] = {}
        self._nothing: Ints = np.zeros(len(instance.pins), dtype=np.int64)
        self._borders()

    def _borders(self) -> None:
        """Which tensors cross the border of each state, and how many of their pins are inside."""
        instance = self.instance
        tensors = len(instance.pins)
        states = len(self.work)
        by_class = np.ascontiguousarray(self._member.T).view(np.uint8)
        most = max((len(pins) for pins in instance.pins), default=0)
        self._inside = np.zeros((tensors + 1, states), dtype=np.uint8 if most < 256 else np.uint16)
        crossing = np.zeros((tensors, states), dtype=bool)
        for index, pins in enumerate(instance.pins):
            held = self._inside[index]
            for pin in pins:
                held += by_class[pin]
            np.logical_and(held > 0, held < len(pins), out=crossing[index])
        state, tensor = np.nonzero(crossing.T)
        counts = np.bincount(state, minlength=states)
        slot = np.arange(len(state)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._border = np.full((states, int(counts.max(initial=0))), tensors, dtype=np.int64)
        self._border[state, slot] = tensor
        self._border_inside = self._inside[self._border, np.arange(states)[:, None]]
        self._border_size = counts

    def members(self, state: int) -> Ints:
        """The classes of a state."""
        return np.flatnonzero(self._member[state])

    def cut_costs(self) -> Ints:
        """State -> bytes that cross its border."""
        return self._border_sum(self.instance.moved)

    def _border_sum(self, weight: Ints) -> Ints:
        """State -> weight of the tensors that cross its border (kept: there are few different weights)."""
        known = self._border_sums.get(id(weight))
        if known is None:
            known = np.append(weight, 0)[self._border].sum(axis=1)
            self._border_sums[id(weight)] = known
        return known

    def loads(self, sources: Ints, targets: Ints, position: Position, limit: int) -> tuple[Ints, Ints]:
        """Load and traffic of the chunk between each source and each target."""
        instance = self.instance
        load = np.full((len(sources), len(targets)), NEVER, dtype=np.int64)
        traffic = np.zeros((len(sources), len(targets)), dtype=np.int64)
        compute = self.prefixes.compute[position.kind]
        spent = compute[targets][None, :] - compute[sources][:, None]
        nested = (spent <= limit) & (spent >= 0)
        for word in self._words:
            nested &= (word[sources][:, None] & ~word[targets][None, :]) == 0
        row, column = np.nonzero(nested)
        weight_in = instance.wires[position.wire_in].ticks if position.wire_in >= 0 else self._nothing
        weight_out = instance.wires[position.wire_out].ticks if position.wire_out >= 0 else self._nothing
        weights = [weight_in, instance.moved] + ([instance.received] if instance.recomputes else [])
        borders = [self._border_sum(weight)[sources] for weight in weights]
        padded = [np.append(weight, 0) for weight in weights]
        padded_out = np.append(weight_out, 0)
        for begin in range(0, len(row), _PAIRS):
            a, b = row[begin : begin + _PAIRS], column[begin : begin + _PAIRS]
            source, target = sources[a], targets[b]
            received = [border[a] for border in borders]
            sent = np.zeros(len(a), dtype=np.int64)
            for slot in range(int(self._border_size[target].max(initial=0))):
                tensor = self._border[target, slot]
                held = self._inside[tensor, source]
                passing = (held == self._border_inside[target, slot]) & (held > 0)
                for total, weight in zip(received, padded):
                    total -= weight[tensor] * passing
                sent += padded_out[tensor] * (held == 0)
            arriving = received[2] if instance.recomputes else sent
            comm = received[0] + sent
            load[a, b] = chunk_loads(instance, self.prefixes, source, target, position, comm, arriving, limit)
            traffic[a, b] = received[1]
        return load, traffic


def _unpack(masks: Sequence[int], n: int) -> NDArray[np.bool_]:
    """Bit masks as rows of booleans."""
    width = (n + 7) // 8
    data = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(data.reshape(len(masks), width), axis=1, bitorder="little")
    return bits[:, :n].astype(bool)


def _pack(member: NDArray[np.bool_]) -> list[NDArray[np.uint64]]:
    """Rows of booleans as 64-bit words, one array per word."""
    rows, n = member.shape
    width = (n + 63) // 64
    wide = np.zeros((rows, width * 64), dtype=bool)
    wide[:, :n] = member
    words = np.packbits(wide, axis=1, bitorder="little").view(np.uint64).reshape(rows, width)
    return [np.ascontiguousarray(words[:, w]) for w in range(width)]


def _sums(member: NDArray[np.bool_], values: Ints) -> Ints:
    """(row of values, state): exact sums over the classes of each state.

    The integers are taken apart into pieces of 26 bits, so that a floating-point product adds them without rounding,
    in whatever order it likes.
    """
    assert member.shape[1] < 1 << 26, "sums of that many pieces would not be exact"
    shifts = (0, 26, 52)
    pieces = np.concatenate([(values >> shift) & ((1 << 26) - 1) for shift in shifts]).astype(np.float64).T
    total = np.zeros((len(values), len(member)), dtype=np.int64)
    for begin in range(0, len(member), _ROWS):
        product = (member[begin : begin + _ROWS].astype(np.float64) @ pieces).T.astype(np.int64)
        for part, shift in enumerate(shifts):
            total[:, begin : begin + _ROWS] += product[part * len(values) : (part + 1) * len(values)] << shift
    return total
