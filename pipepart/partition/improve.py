"""Better cuts near known ones: several good orders, and small moves at every border, in one exact search.

The prefixes of different orders are downsets of the same DAG, so a path may change from one order to another; and a
downset stays one if a ready class is added or a last class is taken away. The search over the union of all of these
is exact, so each round takes the best combination of moves at all borders at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipepart.partition.instance import Instance, Ints
from pipepart.partition.lattice import LatticeStates
from pipepart.partition.route import Route
from pipepart.partition.search import Found, best_path

__all__ = ["improve", "state_mask"]

_ROUNDS = 12
_WORTH = 1e-3
_NEAR = 24
_SWAPS = 6
_CHAIN = 4
_CELLS = 40_000_000


def improve(
    instance: Instance, route: Route, found: Found, cuts: Sequence[int], orders: Iterable[Sequence[int]]
) -> tuple[LatticeStates, Found]:
    """The best path that small changes of the given one lead to. ``cuts``: its downsets as bit masks."""
    edges = np.array([(a, b) for a, after in enumerate(instance.successors) for b in after], dtype=np.int64)
    edges = edges.reshape(-1, 2)
    others = [_prefix_masks(order) for order in orders]
    work = instance.least
    states, best = _known(instance, route, cuts, found)
    for _ in range(_ROUNDS):
        current = [state_mask(states.members(state)) for state in best.path]
        pool = dict.fromkeys(current)
        for cut in current[1:-1]:
            pool.update(dict.fromkeys(_moves(instance, edges, cut)))
        for masks in others:
            pool.update(dict.fromkeys(_nearest(masks, current[1:-1])))
        keep = max(len(current), _CELLS // (len(instance.pins) + instance.classes + 1))
        trial = LatticeStates(instance, list(pool)[:keep], complete=False)
        better = best_path(trial, route, best.bottleneck)
        if better is None or (better.bottleneck, better.traffic) >= (best.bottleneck, best.traffic):
            break
        small = better.bottleneck > best.bottleneck * (1 - _WORTH)
        states, best = trial, better
        if small:
            break
    assert int(states.work[-1]) == int(work.sum()), "the last state is the whole model"
    return states, best


def _known(instance: Instance, route: Route, cuts: Sequence[int], found: Found) -> tuple[LatticeStates, Found]:
    """The given path on states of its own."""
    states = LatticeStates(instance, cuts, complete=False)
    best = best_path(states, route, found.bottleneck)
    assert best is not None, "a path is found again on its own states"
    return states, best


def state_mask(members: Ints) -> int:
    """A downset as a bit mask."""
    flags = np.zeros(int(members.max(initial=0)) + 1, dtype=np.uint8)
    flags[members] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _prefix_masks(order: Sequence[int]) -> list[int]:
    masks = [0]
    for c in order:
        masks.append(masks[-1] | 1 << c)
    return masks


def _nearest(masks: Sequence[int], cuts: Sequence[int]) -> list[int]:
    """Prefixes of an order with about as many classes as the known cuts."""
    near: list[int] = []
    for cut in cuts:
        size = cut.bit_count()
        near.extend(masks[max(0, size - _NEAR) : size + _NEAR + 1])
    return near


def _moves(instance: Instance, edges: Ints, cut: int) -> list[int]:
    """The downset with one ready class more or one last class less, with short chains of them, and with swaps."""
    inside = _flags(cut, instance.classes)
    ready, last = _ready(edges, inside), _ready(edges[:, ::-1], ~inside)
    moves = []
    for c in ready:
        moves.extend(_chain(instance.successors, instance.predecessors, cut, c, inside))
    for c in last:
        moves.extend(_chain(instance.predecessors, instance.successors, cut, c, ~inside))
    for c in ready[:_SWAPS]:
        moves.extend(cut ^ (1 << d) ^ (1 << c) for d in last[:_SWAPS] if d not in instance.predecessors[c])
    return moves


def _flags(cut: int, classes: int) -> NDArray[np.bool_]:
    data = np.frombuffer(cut.to_bytes((classes + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(data, bitorder="little")[:classes].astype(bool)


def _ready(edges: Ints, inside: NDArray[np.bool_]) -> list[int]:
    """Classes outside with everything before them inside; those with something before them first."""
    source, target = edges[:, 0], edges[:, 1]
    missing = np.bincount(target[~inside[source]], minlength=len(inside))
    before = np.bincount(target, minlength=len(inside))
    ready = np.flatnonzero(~inside & (missing == 0))
    chosen: list[int] = ready[np.argsort(before[ready] == 0, kind="stable")][:_NEAR].tolist()
    return chosen


def _chain(
    after: Sequence[Sequence[int]], before: Sequence[Sequence[int]], cut: int, start: int, inside: NDArray[np.bool_]
) -> list[int]:
    """Flip a class, then what becomes free by that, up to a few classes."""
    flipped = {start}
    chain = [cut ^ (1 << start)]
    current = start
    for _ in range(_CHAIN):
        free = (c for c in after[current] if all(inside[p] or p in flipped for p in before[c]))
        following = next(free, None)
        if following is None or following in flipped:
            break
        flipped.add(following)
        chain.append(chain[-1] ^ (1 << following))
        current = following
    return chain
