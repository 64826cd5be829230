"""Downsets in bulk: all of them, their sums, and the tensors that cross their borders.

Most downsets of a long model are a full prefix of the classes, a few classes of the part that is being worked on, and
nothing after it. So downsets are handled in blocks of similar size, and only the classes between the shortest full
prefix and the last class in use are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipepart.partition.instance import Instance, Ints

__all__ = ["Bulk", "all_downsets", "bulk", "exact_sums"]

_ROWS = 256
_PIECE = 26


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


@dataclass(frozen=True, eq=False)
class Bulk:
    """Downsets in the order of their work (and a subset before its supersets), one row or column each."""

    words: NDArray[np.uint64]
    """(state, word): the classes as bits."""
    low: Ints
    """State -> length of the longest prefix of the classes that it holds in full."""
    high: Ints
    """State -> one more than its last class."""
    size: Ints
    """State -> number of classes."""
    sums: Ints
    """(row of values, state): the values added up over the classes of the state."""
    border: Ints
    """(state, slot): the tensors that cross the border; the number of tensors where a slot is empty."""
    inside: Ints
    """(state, slot): how many of their pins are inside."""


def bulk(instance: Instance, masks: Sequence[int], values: Ints) -> Bulk:
    """All that is asked of many downsets at once. The first row of the values is the work that they are ordered by."""
    masks = sorted(dict.fromkeys(masks), key=lambda mask: (mask.bit_count(), mask))
    low = np.array([(~mask & (mask + 1)).bit_length() - 1 for mask in masks], dtype=np.int64)
    high = np.array([mask.bit_length() for mask in masks], dtype=np.int64)
    prefix = np.concatenate((np.zeros((len(values), 1), dtype=np.int64), np.cumsum(values, axis=1)), axis=1)
    pins = _Pins(instance)
    sums = np.zeros((len(values), len(masks)), dtype=np.int64)
    rows, tensors, counts = [], [], []
    for begin in range(0, len(masks), _ROWS):
        block = slice(begin, begin + _ROWS)
        first, last = int(low[block].min()), int(high[block].max())
        last = max(first, last)
        member = _unpack([(mask >> first) & ((1 << (last - first)) - 1) for mask in masks[block]], last - first)
        sums[:, block] = prefix[:, first : first + 1] + exact_sums(member, values[:, first:last])
        row, tensor, count = pins.crossing(member, first, last)
        rows.append(row + begin)
        tensors.append(tensor)
        counts.append(count)
    state, tensor, count = (np.concatenate(parts) for parts in (rows, tensors, counts))
    size = np.array([mask.bit_count() for mask in masks], dtype=np.int64)
    rank = np.lexsort((np.arange(len(masks)), size, sums[0]))
    border, inside = _slots(state, tensor, count, len(masks), len(instance.pins))
    width = (instance.classes + 63) // 64
    words = np.frombuffer(b"".join(mask.to_bytes(8 * width, "little") for mask in masks), dtype="<u8")
    return Bulk(
        words=words.reshape(len(masks), width)[rank].astype(np.uint64),
        low=low[rank],
        high=high[rank],
        size=size[rank],
        sums=np.ascontiguousarray(sums[:, rank]),
        border=border[rank],
        inside=inside[rank],
    )


class _Pins:
    """The pins of all tensors in one array, to count those inside of many downsets at once."""

    def __init__(self, instance: Instance) -> None:
        self.sizes = np.array([len(pins) for pins in instance.pins], dtype=np.int64)
        self.flat = np.array([pin for pins in instance.pins for pin in pins], dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.first = np.array([pins[0] for pins in instance.pins], dtype=np.int64)
        self.last = np.array([pins[-1] for pins in instance.pins], dtype=np.int64)

    def crossing(self, member: NDArray[np.bool_], first: int, last: int) -> tuple[Ints, Ints, Ints]:
        """Row, tensor and pins inside for every tensor on a border. Classes before ``first`` are inside of all rows."""
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


def _slots(state: Ints, tensor: Ints, count: Ints, states: int, tensors: int) -> tuple[Ints, Ints]:
    """Lists of tensors per state (sorted by state) as a table with empty slots at the end of each row."""
    sizes = np.bincount(state, minlength=states)
    slot = np.arange(len(state)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    border = np.full((states, int(sizes.max(initial=0))), tensors, dtype=np.int64)
    inside = np.zeros_like(border)
    border[state, slot] = tensor
    inside[state, slot] = count
    return border, inside


def exact_sums(member: NDArray[np.bool_], values: Ints) -> Ints:
    """(row of values, state): exact sums over the classes of each state.

    The integers are taken apart into pieces of 26 bits, so that a floating-point product adds them without rounding,
    in whatever order it likes.
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


def _unpack(masks: Sequence[int], n: int) -> NDArray[np.bool_]:
    """Bit masks as rows of booleans."""
    width = (n + 7) // 8
    data = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(data.reshape(len(masks), width), axis=1, bitorder="little")
    return bits[:, :n].astype(bool)
