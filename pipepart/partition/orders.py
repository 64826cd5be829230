"""Linear orders of the classes to slice: the program's own, depth first from both ends, and least open bytes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from pipepart.partition.instance import Instance

__all__ = ["linear_orders"]

_LOOK = 64


def linear_orders(instance: Instance) -> list[tuple[str, list[int]]]:
    """Different topological orders, the program's first. Forced cuts are respected by all of them."""
    n = instance.classes
    side = instance.side.tolist()
    orders = [("program order", list(range(n)))]
    orders.append(("depth first", _depth_first(instance.successors, instance.predecessors, side)))
    top = max(side, default=0)
    mirrored = _depth_first(instance.predecessors, instance.successors, [top - s for s in side])
    orders.append(("depth first from the end", mirrored[::-1]))
    orders.append(("least open bytes", _least_open(instance, side)))
    seen: set[tuple[int, ...]] = set()
    different = []
    for name, order in orders:
        if tuple(order) not in seen:
            seen.add(tuple(order))
            different.append((name, order))
    return different


def _depth_first(
    successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]], side: Sequence[int]
) -> list[int]:
    """Go on with what has just become possible: finish a branch before the next one is begun."""
    clock = 0

    def newest(_: int) -> int:
        nonlocal clock
        clock -= 1
        return clock

    return _topological(successors, predecessors, side, newest)


def _topological(
    successors: Sequence[Sequence[int]],
    predecessors: Sequence[Sequence[int]],
    side: Sequence[int],
    key: Callable[[int], int],
) -> list[int]:
    waiting = [len(before) for before in predecessors]
    ready = [(side[c], key(c), c) for c in range(len(waiting)) if not waiting[c]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, _, c = heapq.heappop(ready)
        order.append(c)
        for other in reversed(successors[c]):
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (side[other], key(other), other))
    return order


def _least_open(instance: Instance, side: Sequence[int]) -> list[int]:
    """Always the class that opens the fewest bytes, or closes the most."""
    touching: list[list[int]] = [[] for _ in range(instance.classes)]
    for tensor, pins in enumerate(instance.pins):
        for pin in pins:
            touching[pin].append(tensor)
    size = instance.moved.tolist()
    left = [len(pins) for pins in instance.pins]
    opened = [False] * len(left)
    waiting = [len(before) for before in instance.predecessors]
    ready = sorted(c for c in range(instance.classes) if not waiting[c])
    order = []
    while ready:
        best = min(
            ready[:_LOOK],
            key=lambda c: (
                side[c],
                sum((0 if opened[t] else size[t]) - (size[t] if left[t] == 1 else 0) for t in touching[c]),
                c,
            ),
        )
        lowest = min(side[c] for c in ready)
        if side[best] > lowest:
            best = min(c for c in ready if side[c] == lowest)
        ready.remove(best)
        order.append(best)
        for tensor in touching[best]:
            opened[tensor] = True
            left[tensor] -= 1
        for other in instance.successors[best]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return order
