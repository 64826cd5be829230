"""The costs of units as whole numbers, and the load of a chunk.

Times become integers (*ticks*), so fine that the whole model is about 2**52 of them. Sums of integers do not depend on
their order or on the processor, so every machine finds the same partition, and differences of sums are exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipepart.partition.device_orders import Place
from pipepart.partition.problem import Problem, Tensor
from pipepart.partition.units import UnitGraph

__all__ = ["NEVER", "Amounts", "Ints", "UnitCosts", "make_unit_costs"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SINGLE = 5
"""Number of rows of `Amounts` that do not depend on the device kind; the last of them is the number of units."""

NEVER = 1 << 60
"""Load of a chunk that is not allowed."""


@dataclass(frozen=True, eq=False)
class Amounts:
    """All amounts that add up over units: one column per unit, or one column per downset with the sums of its units."""

    rows: Ints
    """(row, column): least, needed, state, saved, size; compute, extra and unable per device kind; before per cut."""
    kinds: int
    """Number of device kinds."""

    @property
    def least(self) -> Ints:
        """Ticks on the fastest device."""
        return self._row(0)

    @property
    def needed(self) -> Ints:
        """Units of which a chunk needs at least one: those with work, or all if too few have work."""
        return self._row(1)

    @property
    def state(self) -> Ints:
        """Bytes of parameters, gradients and optimizer state."""
        return self._row(2)

    @property
    def saved(self) -> Ints:
        """Bytes kept for backward, per micro-batch."""
        return self._row(3)

    @property
    def compute(self) -> Ints:
        """(kind, column): ticks, forward and backward."""
        return self._row(slice(_SINGLE, _SINGLE + self.kinds))

    @property
    def extra(self) -> Ints:
        """(kind, column): ticks that recomputation adds."""
        return self._row(slice(_SINGLE + self.kinds, _SINGLE + 2 * self.kinds))

    @property
    def unable(self) -> Ints:
        """(kind, column): number of ops that the device cannot run."""
        return self._row(slice(_SINGLE + 2 * self.kinds, _SINGLE + 3 * self.kinds))

    @property
    def _before(self) -> Ints:
        """(forced cut, column): number of units before the cut."""
        return self._row(slice(_SINGLE + 3 * self.kinds, None))

    def _row(self, which: int | slice) -> Ints:
        row: Ints = self.rows[which]
        return row

    @cached_property
    def cuts(self) -> Ints:
        """Number of forced cuts that lie inside or at the border of each downset."""
        cuts: Ints = (self._before == self._before[:, -1:]).sum(axis=0)
        return cuts

    @cached_property
    def at_cut(self) -> NDArray[np.bool_]:
        """Whether the border of each downset is a forced cut."""
        sizes = np.concatenate((np.full(1, -1, dtype=np.int64), self._before[:, -1]))
        at_cut: NDArray[np.bool_] = sizes[self.cuts] == self.rows[_SINGLE - 1]
        return at_cut

    def changed(self, change: Callable[[Ints], Ints]) -> Amounts:
        """The same amounts over other columns."""
        return Amounts(change(self.rows), self.kinds)


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """A problem over units: their graph, their amounts in whole numbers, and the tensors between them."""

    graph: UnitGraph
    amounts: Amounts
    pins: tuple[tuple[int, ...], ...]
    """Units that share each tensor, in order."""
    link_ticks: tuple[Ints, ...]
    """Per link: ticks that a chunk pays for each tensor."""
    received: Ints
    """Bytes of each tensor that its receiver keeps if it recomputes."""
    moved: Ints
    """Bytes of each tensor, forward and back: the traffic."""
    overlap: bool
    keeps: bool
    """Whether chunks may keep their saved tensors."""
    recomputes: bool
    """Whether chunks may recompute."""
    scale: float
    """Ticks per second."""
    slowness: tuple[float, ...]
    """Least time of an op on each device kind, relative to the fastest device."""

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.graph.successors)

    @cached_property
    def touching(self) -> list[list[int]]:
        """Tensors of each unit."""
        touching: list[list[int]] = [[] for _ in range(self.units)]
        for tensor, pins in enumerate(self.pins):
            for pin in pins:
                touching[pin].append(tensor)
        return touching

    @cached_property
    def limited(self) -> bool:
        """Whether memory or recomputation can matter at all."""
        return bool(self.amounts.state.any() or self.amounts.saved.any() or not self.keeps)

    def merged(self, graph: UnitGraph) -> UnitCosts:
        """The costs of merged units. Tensors inside one unit vanish, tensors between the same units add up."""
        groups: dict[tuple[int, ...], int] = {}
        kept, group = [], []
        for tensor, pins in enumerate(self.pins):
            where = tuple(sorted({graph.unit_of[pin] for pin in pins}))
            if len(where) > 1:
                kept.append(tensor)
                group.append(groups.setdefault(where, len(groups)))

        def gather(values: Ints) -> Ints:
            return _add(values[kept], np.array(group, dtype=np.int64), len(groups))

        return dataclasses.replace(
            self,
            graph=graph,
            amounts=self.amounts.changed(lambda rows: _add(rows, np.array(graph.unit_of), len(graph.members))),
            pins=tuple(groups),
            link_ticks=tuple(map(gather, self.link_ticks)),
            received=gather(self.received),
            moved=gather(self.moved),
        )

    def loads(
        self, sums: Amounts, source: Ints, target: Ints, place: Place, comm: Ints, received: Ints, limit: int
    ) -> Ints:
        """Ticks of the chunks between source and target downsets (arrays that broadcast); `NEVER` where not allowed.

        ``comm`` are the ticks of the tensors that cross the borders, ``received`` the bytes that arrive, which a chunk
        that recomputes keeps.
        """
        kind = place.kind
        compute = sums.compute[kind][target] - sums.compute[kind][source]
        load = np.maximum(compute, comm) if self.overlap else compute + comm
        valid = (sums.needed[target] > sums.needed[source]) & (sums.unable[kind][target] == sums.unable[kind][source])
        if sums.cuts[-1]:
            passed = sums.cuts[target] - sums.cuts[source]
            valid &= (passed == 0) | ((passed == 1) & sums.at_cut[target])
        if self.limited:
            state = sums.state[target] - sums.state[source]
            saved = sums.saved[target] - sums.saved[source]
            fits = (state + place.held * saved <= place.limit) & self.keeps
            if self.recomputes:
                again = compute + sums.extra[kind][target] - sums.extra[kind][source]
                slower = np.maximum(again, comm) if self.overlap else again + comm
                needed = state + (place.held * received + saved if place.held else 0)
                load = np.where(fits, load, slower)
                fits = fits | (needed <= place.limit)
            valid &= fits
        return np.where(valid & (load <= limit), load, NEVER)


def make_unit_costs(problem: Problem, graph: UnitGraph, chunks: int, *, require_work: bool = True) -> UnitCosts:
    """The whole-number costs of the units of a problem. ``require_work``: every chunk needs a unit with work."""
    crossing: list[tuple[tuple[int, ...], Tensor]] = []
    for tensor in problem.traffic:
        pins = tuple(sorted({graph.unit_of[op] for op in tensor.ops}))
        if len(pins) > 1 and tensor.size + tensor.gradient > 0:
            crossing.append((pins, tensor))
    tensors = [tensor for _, tensor in crossing]
    links = problem.different_links(chunks)
    seconds = np.array([[link.seconds(t.size) + link.seconds(t.gradient) for t in tensors] for link in links])
    seconds = seconds.reshape(len(links), len(tensors))
    compute, extra, unable = _times(problem, graph)
    total = math.fsum(compute.max(axis=0)) + math.fsum(extra.max(axis=0))
    total += math.fsum(seconds.max(axis=0)) if tensors else 0.0
    scale = math.ldexp(1.0, 51 - max(math.frexp(total)[1], -900))
    ticks, able = _round(compute * scale), unable == 0
    least = np.where(able, ticks, NEVER).min(axis=0)
    least = np.where(least >= NEVER, 0, least)
    count = len(graph.members)
    needed = (able & (ticks > 0)).any(axis=0) if require_work else np.ones(count, dtype=bool)
    side = np.array(graph.side)
    rows = [
        least,
        needed,
        _round(graph.sums(problem.parameter_bytes * problem.state_factor)),
        _round(graph.sums(problem.saved_bytes)),
        np.ones(count),
        *ticks,
        *_round(extra * scale),
        *unable,
        *(side < cut for cut in range(1, int(side.max()) + 1)),
    ]
    return UnitCosts(
        graph=graph,
        amounts=Amounts(np.array([row.astype(np.int64) for row in rows]), len(ticks)),
        pins=tuple(pins for pins, _ in crossing),
        link_ticks=tuple(_round(seconds * scale)),
        received=_round(np.array([tensor.size for tensor in tensors])),
        moved=_round(np.array([tensor.size + tensor.gradient for tensor in tensors])),
        overlap=problem.overlap,
        keeps="none" in problem.recompute,
        recomputes="full" in problem.recompute,
        scale=scale,
        slowness=tuple(_slowness(mine[ok & (least > 0)], least[ok & (least > 0)]) for mine, ok in zip(ticks, able)),
    )


def _times(problem: Problem, graph: UnitGraph) -> tuple[Floats, Floats, Floats]:
    """(kind, unit): seconds of forward and backward, seconds of forward alone, number of ops that cannot run."""
    rows: tuple[list[Floats], list[Floats], list[Floats]] = ([], [], [])
    kinds = problem.device_kinds
    for kind in range(max(kinds) + 1):
        forward, backward = problem.seconds(kinds.index(kind))
        unable = ~(np.isfinite(forward) & np.isfinite(backward))
        forward, backward = np.where(unable, 0.0, forward), np.where(unable, 0.0, backward)
        for row, values in zip(rows, (forward + backward, forward, unable)):
            row.append(graph.sums(values))
    compute, extra, unable_ops = (np.array(row) for row in rows)
    return compute, extra, unable_ops


def _slowness(ticks: Ints, least: Ints) -> float:
    """The least ratio of two rows of ticks, rounded down; 1 if they are empty."""
    return (float((ticks / least).min()) if len(ticks) else 1.0) * (1 - 1e-9)


def _add(values: Ints, index: Ints, size: int) -> Ints:
    """Sums along the last axis of the values that share an index."""
    total = np.zeros((*values.shape[:-1], size), dtype=np.int64)
    np.add.at(total.T, index, values.T)
    return total


def _round(values: Floats) -> Ints:
    return np.rint(values).astype(np.int64)
