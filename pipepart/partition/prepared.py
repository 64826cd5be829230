"""The reduced costs and the states of a problem, computed once and kept for searches with other numbers of chunks.

A planner partitions the same model for many numbers of chunks and micro-batches. Units, orders and downsets stay the
same, and so do the reductions: units without work join a neighbour, wherever no better cut lies between the two.

Let ``v`` have no work and no memory. Moving ``v`` to the chunk of a neighbour changes no compute, so only the tensors
that ``v`` shares matter.

    leaf       v -> w ...      every tensor of v is also one of w, and w comes before all other users of v (or after
                               all other sources of v): v joins w. No chunk gets a tensor that it did not have.
    follower   u -> v -> ...   u is the only source of v, and the tensors that only u and v share cost at least as much
                               as all others of v: a cut after v is never worse than one before it. v joins u.
    leader     ... -> v -> w   the mirror image: v joins w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from pipepart.partition.downsets import DownsetStates, all_downsets
from pipepart.partition.linear_orders import LinearStates, linear_orders
from pipepart.partition.problem import Problem
from pipepart.partition.unit_costs import Ints, UnitCosts, make_unit_costs
from pipepart.partition.units import UnitGraph, merge, unit_graph

__all__ = ["Prepared", "all_costs", "prepare", "reduce_units"]

_MOST_DOWNSETS = 60_000
_MOST_BYTES = 200_000_000
_KEPT_BYTES = 100_000_000
_LARGE = 3000


@lru_cache(maxsize=4)
def all_costs(problem: Problem, chunks: int, require_work: bool) -> UnitCosts:
    """Costs of all units, before any reduction. ``chunks`` is 0 if all links are the same, so that it has no effect."""
    return make_unit_costs(problem, unit_graph(problem), chunks, require_work=require_work)


@lru_cache(maxsize=2)
def prepare(problem: Problem, chunks: int, require_work: bool, memory_matters: bool) -> Prepared:
    """The reduced costs and their states. ``chunks`` as in `all_costs`."""
    return Prepared(*reduce_units(all_costs(problem, chunks, require_work), memory_matters=memory_matters))


@dataclass(eq=False)
class Prepared:
    """Reduced costs with the states that searches work on."""

    costs: UnitCosts
    merged: UnitGraph
    """Maps the units of the problem to the units of the costs."""

    @cached_property
    def orders(self) -> list[tuple[str, LinearStates]]:
        """Linear orders to slice; fewer of them for large graphs."""
        orders = linear_orders(self.costs)
        if self.costs.units > _LARGE:
            orders = orders[:3]
        return [(name, LinearStates(self.costs, order)) for name, order in orders]

    @cached_property
    def chain(self) -> LinearStates | None:
        """The only topological order, if every unit feeds the next one (and perhaps later ones)."""
        if all(unit + 1 in after for unit, after in enumerate(self.costs.graph.successors[:-1])):
            return LinearStates(self.costs, range(self.costs.units), complete=True)
        return None

    @cached_property
    def downsets(self) -> DownsetStates | None:
        """All downsets, if they are few enough."""
        downsets = all_downsets(self.costs, min(_MOST_DOWNSETS, _MOST_BYTES // self._bytes_per_downset))
        return None if downsets is None else DownsetStates(self.costs, downsets, complete=True)

    @property
    def _bytes_per_downset(self) -> int:
        # The bits themselves, the sums and the borders.
        return self.costs.units // 8 + 8 * len(self.costs.amounts.compute) * 3 + 1000

    def forget(self) -> None:
        """Release everything that is too large to be kept for the next search."""
        made = self.__dict__
        for states in (made.get("chain"), made.get("downsets"), *(states for _, states in made.get("orders", ()))):
            if states is not None:
                states.tables.clear()
        downsets = made.get("downsets")
        if downsets is not None and len(downsets.work) * self._bytes_per_downset > _KEPT_BYTES:
            del made["downsets"]


def reduce_units(costs: UnitCosts, *, memory_matters: bool) -> tuple[UnitCosts, UnitGraph]:
    """Costs of fewer units with the same smallest bottleneck, and the graph that maps the old units to the new ones."""
    current = costs
    unit_of = list(range(costs.units))
    while (merged := _round(current, memory_matters)) is not None:
        unit_of = [merged.unit_of[unit] for unit in unit_of]
        current = current.merged(merged)
    groups: dict[int, list[int]] = {}
    for old, new in enumerate(unit_of):
        groups.setdefault(new, []).append(old)
    together = [group for group in groups.values() if len(group) > 1]
    final = merge(costs.graph.edges, together, costs.graph.side)
    return costs.merged(final), final


def _round(costs: UnitCosts, memory_matters: bool) -> UnitGraph | None:
    """One pass over all units: each joins at most one other, and none that was joined before. None: nothing joins."""
    amounts, graph = costs.amounts, costs.graph
    busy = amounts.compute.any(axis=0) | amounts.extra.any(axis=0) | (amounts.needed > 0) | amounts.unable.any(axis=0)
    if memory_matters:
        busy |= (amounts.state != 0) | (amounts.saved != 0)
    weights = np.stack((*costs.link_ticks, costs.received, costs.moved))
    pins = [frozenset(tensor) for tensor in costs.pins]
    moved: set[int] = set()
    pairs = []
    for unit in np.flatnonzero(~busy).tolist():
        if unit in moved:
            continue
        target = _target(costs, unit, pins, weights)
        if target is not None and target not in moved and graph.side[target] == graph.side[unit]:
            pairs.append((unit, target))
            moved.update((unit, target))
    if not pairs:
        return None
    merged = merge(graph.edges, pairs, graph.side)
    assert len(merged.members) == costs.units - len(pairs), "joining a neighbour makes no cycle"
    return merged


def _target(costs: UnitCosts, unit: int, pins: Sequence[frozenset[int]], weights: Ints) -> int | None:
    """The neighbour that an idle unit joins, or none."""
    before, after, touching = costs.graph.predecessors[unit], costs.graph.successors[unit], costs.touching[unit]
    one_link = len(costs.link_ticks) == 1
    leaf = None
    if not before and after and _reaches(costs.graph.successors, after[0], after[1:]):
        leaf = after[0]
    elif not after and before and _reaches(costs.graph.predecessors, before[-1], before[:-1]):
        leaf = before[-1]
    if leaf is not None and (one_link or len(after) + len(before) == 1) and all(leaf in pins[t] for t in touching):
        return leaf
    for neighbours in (before, after):
        if len(neighbours) == 1:
            other = neighbours[0]
            pair = frozenset((unit, other))
            between = [t for t in touching if pins[t] == pair]
            beyond = [t for t in touching if (other not in pins[t] if one_link else pins[t] != pair)]
            if np.all(weights[:, beyond].sum(axis=1) <= weights[:, between].sum(axis=1)):
                return other
    return None


def _reaches(step: Sequence[Sequence[int]], start: int, others: Sequence[int], most: int = 2000) -> bool:
    """Whether all other units are reached from one unit. The answer is no after ``most`` units."""
    goals = set(others)
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
