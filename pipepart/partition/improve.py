"""Better cuts near known ones: several good orders, and small moves at every border, in one exact search.

The prefixes of different orders are downsets of the same graph, so a path may change from one order to another; and a
downset remains a downset if a ready unit is added or a last unit is removed. The search over the union of all of these is
exact, so each round takes the best combination of moves at all borders at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipepart.partition.bottleneck import Found, best_path
from pipepart.partition.device_orders import DeviceOrders
from pipepart.partition.downsets import DownsetStates, as_mask, unpack
from pipepart.partition.unit_costs import Ints, UnitCosts

__all__ = ["improve"]

_ROUNDS = 12
_WORTH = 1e-3
_NEAR = 24
_SWAPS = 6
_CHAIN = 4
_CELLS = 40_000_000


def improve(
    costs: UnitCosts, devices: DeviceOrders, found: Found, cuts: Sequence[int], orders: Iterable[Sequence[int]]
) -> tuple[DownsetStates, Found]:
    """The best path that small changes of the given one lead to. ``cuts`` are its downsets as bit masks."""
    edges = np.array(costs.graph.edges, dtype=np.int64).reshape(-1, 2)
    others = [_prefix_masks(order) for order in orders]
    states = DownsetStates(costs, cuts, complete=False)
    known = best_path(states, devices, found.bottleneck)
    assert known is not None, "a path is found again on its own states"
    best = known
    for _ in range(_ROUNDS):
        current = [as_mask(states.members(state)) for state in best.path]
        pool = dict.fromkeys(current)
        for cut in current[1:-1]:
            pool.update(dict.fromkeys(_moves(costs, edges, cut)))
        for masks in others:
            pool.update(dict.fromkeys(_nearest(masks, current[1:-1])))
        keep = max(len(current), _CELLS // (len(costs.pins) + costs.units + 1))
        trial = DownsetStates(costs, list(pool)[:keep], complete=False)
        better = best_path(trial, devices, best.bottleneck)
        if better is None or (better.bottleneck, better.traffic) >= (best.bottleneck, best.traffic):
            break
        small = better.bottleneck > best.bottleneck * (1 - _WORTH)
        states, best = trial, better
        if small:
            break
    assert int(states.work[-1]) == int(costs.amounts.least.sum()), "the last state is the whole model"
    return states, best


def _prefix_masks(order: Sequence[int]) -> list[int]:
    masks = [0]
    for c in order:
        masks.append(masks[-1] | 1 << c)
    return masks


def _nearest(masks: Sequence[int], cuts: Sequence[int]) -> list[int]:
    """Prefixes of an order with about as many units as the known cuts."""
    near: list[int] = []
    for cut in cuts:
        size = cut.bit_count()
        near.extend(masks[max(0, size - _NEAR) : size + _NEAR + 1])
    return near


def _moves(costs: UnitCosts, edges: Ints, cut: int) -> list[int]:
    """The downset with one ready unit more or one last unit less, with short chains of them, and with swaps."""
    inside = unpack([cut], costs.units)[0]
    ready, last = _ready(edges, inside), _ready(edges[:, ::-1], ~inside)
    moves = []
    for c in ready:
        moves.extend(_chain(costs.graph.successors, costs.graph.predecessors, cut, c, inside))
    for c in last:
        moves.extend(_chain(costs.graph.predecessors, costs.graph.successors, cut, c, ~inside))
    for c in ready[:_SWAPS]:
        moves.extend(cut ^ (1 << d) ^ (1 << c) for d in last[:_SWAPS] if d not in costs.graph.predecessors[c])
    return moves


def _ready(edges: Ints, inside: NDArray[np.bool_]) -> list[int]:
    """Units outside with all their sources inside; those that have sources come first."""
    source, target = edges[:, 0], edges[:, 1]
    missing = np.bincount(target[~inside[source]], minlength=len(inside))
    before = np.bincount(target, minlength=len(inside))
    ready = np.flatnonzero(~inside & (missing == 0))
    chosen: list[int] = ready[np.argsort(before[ready] == 0, kind="stable")][:_NEAR].tolist()
    return chosen


def _chain(
    after: Sequence[Sequence[int]], before: Sequence[Sequence[int]], cut: int, start: int, inside: NDArray[np.bool_]
) -> list[int]:
    """Downsets with one unit flipped, then also the units that this makes free, up to a few units."""
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
