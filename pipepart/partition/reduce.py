"""Reductions that lose nothing: ops without work join a neighbour, wherever no better cut lies between the two.

Let ``v`` have no work and no memory. Moving ``v`` to the chunk of a neighbour changes no compute, so only the tensors
that ``v`` shares matter.

    leaf       v -> w ...      every tensor of v is also one of w, and w comes before all other users of v (or after
                               all other sources of v): v joins w. No chunk gets a tensor that it did not have.
    follower   u -> v -> ...   u is the only source of v, and the tensors that only u and v share cost at least as much
                               as all others of v: a cut after v is never worse than one before it. v joins u.
    leader     ... -> v -> w   the mirror image: v joins w.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pipepart.partition.instance import Instance, Ints, Wire
from pipepart.partition.quotient import Quotient, contract

__all__ = ["reduce_instance"]


def reduce_instance(instance: Instance, *, memory_matters: bool) -> tuple[Instance, Quotient]:
    """A smaller instance with the same smallest bottleneck, and the classes of the old one in the new."""
    current = instance
    root = list(range(instance.classes))
    while True:
        merged = _round(current, memory_matters)
        if merged is None:
            break
        root = [merged.class_of[c] for c in root]
        current = _merge(current, merged)
    first: dict[int, int] = {}
    forest = [first.setdefault(c, index) for index, c in enumerate(root)]
    edges = [(a, b) for a, after in enumerate(instance.successors) for b in after]
    final = contract(forest, edges, instance.side.tolist())
    return _merge(instance, final), final


def _round(instance: Instance, memory_matters: bool) -> Quotient | None:
    """One pass over all classes: every class joins at most one other, and none that was joined before."""
    idle = (instance.compute.sum(axis=0) == 0) & (instance.extra.sum(axis=0) == 0) & (instance.counts == 0)
    idle &= instance.forbidden.sum(axis=0) == 0
    if memory_matters:
        idle &= (instance.state == 0) & (instance.saved == 0)
    if not idle.any():
        return None
    touching: list[list[int]] = [[] for _ in range(instance.classes)]
    for tensor, pins in enumerate(instance.pins):
        for pin in pins:
            touching[pin].append(tensor)
    weights = np.stack([wire.ticks for wire in instance.wires] + [instance.received, instance.moved])
    shared = [frozenset(tensor) for tensor in instance.pins]
    one_wire = len(instance.wires) == 1
    root = list(range(instance.classes))
    moved: set[int] = set()
    for v in np.flatnonzero(idle).tolist():
        if v in moved:
            continue
        target = _target(instance, v, touching[v], shared, weights, one_wire)
        if target is not None and target not in moved and instance.side[target] == instance.side[v]:
            root[max(v, target)] = min(v, target)
            moved.update((v, target))
    if not moved:
        return None
    edges = [(a, b) for a, after in enumerate(instance.successors) for b in after]
    merged = contract(root, edges, instance.side.tolist())
    assert len(merged.members) == instance.classes - len(moved) // 2, "joining a neighbour makes no cycle"
    return merged


def _target(
    instance: Instance, v: int, touching: list[int], pins: list[frozenset[int]], weights: Ints, one_wire: bool
) -> int | None:
    """The neighbour that an idle class joins, or none."""
    before, after = instance.predecessors[v], instance.successors[v]
    leaf = None
    if not before and after and _precedes_all(instance, after[0], after):
        leaf = after[0]
    elif not after and before and _follows_all(instance, before[-1], before):
        leaf = before[-1]
    if leaf is not None and (one_wire or len(after) + len(before) == 1) and all(leaf in pins[t] for t in touching):
        return leaf
    for neighbours in (before, after):
        if len(neighbours) == 1:
            other = neighbours[0]
            pair = frozenset((v, other))
            between = [t for t in touching if pins[t] == pair]
            beyond = [t for t in touching if (other not in pins[t] if one_wire else pins[t] != pair)]
            if np.all(weights[:, beyond].sum(axis=1) <= weights[:, between].sum(axis=1)):
                return other
    return None


def _precedes_all(instance: Instance, first: int, others: tuple[int, ...]) -> bool:
    """Every other class is reached from the first one (looked for a few steps only)."""
    return _reaches(instance.successors, first, set(others) - {first})


def _follows_all(instance: Instance, last: int, others: tuple[int, ...]) -> bool:
    return _reaches(instance.predecessors, last, set(others) - {last})


def _reaches(step: tuple[tuple[int, ...], ...], start: int, goals: set[int], most: int = 2000) -> bool:
    seen = {start}
    stack = [start]
    while stack and goals:
        if len(seen) > most:
            return False
        for other in step[stack.pop()]:
            if other not in seen:
                seen.add(other)
                goals.discard(other)
                stack.append(other)
    return not goals


def _merge(instance: Instance, merged: Quotient) -> Instance:
    """The instance of the merged classes; tensors inside one class vanish, tensors between the same ones add up."""
    of_class = np.array(merged.class_of)
    size = len(merged.members)

    def add(values: Ints) -> Ints:
        total = np.zeros((*values.shape[:-1], size), dtype=np.int64)
        np.add.at(total.T, of_class, values.T)
        return total

    groups: dict[tuple[int, ...], int] = {}
    kept, group = [], []
    for tensor, pins in enumerate(instance.pins):
        where = tuple(sorted({merged.class_of[pin] for pin in pins}))
        if len(where) > 1:
            kept.append(tensor)
            group.append(groups.setdefault(where, len(groups)))

    def gather(values: Ints) -> Ints:
        total = np.zeros(len(groups), dtype=np.int64)
        np.add.at(total, group, values[kept])
        return total

    return dataclasses.replace(
        instance,
        successors=merged.successors,
        predecessors=merged.predecessors,
        side=np.array(merged.side, dtype=np.int64),
        compute=add(instance.compute),
        extra=add(instance.extra),
        forbidden=add(instance.forbidden),
        least=add(instance.least),
        counts=add(instance.counts),
        state=add(instance.state),
        saved=add(instance.saved),
        pins=tuple(groups),
        wires=tuple(Wire(gather(wire.ticks)) for wire in instance.wires),
        received=gather(instance.received),
        moved=gather(instance.moved),
    )
