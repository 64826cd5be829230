"""Local moves: from a known split to a better one, judged by what really counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from pipepart.partition import Problem
from pipepart.partition.units import UnitGraph, unit_graph

__all__ = ["Mover"]

Ints = NDArray[np.int64]
Score = tuple[float, float]

_SIZES = (1, 2, 3, 5, 8, 13, 21, 34)
"""Numbers of units that a move takes at once."""


class Mover:
    """Moves units of ops over the cuts of a split."""

    def __init__(self, problem: Problem) -> None:
        self._graph: UnitGraph = unit_graph(problem)
        self._unit_of = np.asarray(self._graph.unit_of, dtype=np.int64)
        seconds = np.asarray(problem.forward + problem.backward)
        self._seconds = self._graph.sums(seconds)
        self._side = np.asarray(self._graph.side)

    def improve(
        self, chunk_of: Ints, chunks: int, score: Callable[[Ints], Score], known: Score, budget: int
    ) -> tuple[Ints, Score, int]:
        """Take the best move over each cut in turn until none helps or the budget of scores is spent.

        Returns the split, its score and how many scores were taken. Nothing is random: the same split comes out of the
        same input.
        """
        units = np.zeros(len(self._graph.members), dtype=np.int64)
        units[self._unit_of] = chunk_of
        best, spent, changed = known, 0, True
        while changed and spent < budget:
            changed = False
            for cut in range(chunks - 1):
                taken: Ints | None = None
                for candidate in self._over(units, cut):
                    if spent >= budget:
                        break
                    spent += 1
                    found = score(candidate[self._unit_of])
                    if found < _a_little_less(best):
                        best, taken = found, candidate
                if taken is not None:
                    units, changed = taken, True
        return units[self._unit_of], best, spent

    def _over(self, units: Ints, cut: int) -> Iterator[Ints]:
        """Splits with the last units of the chunk before the cut moved behind it, or the first ones to before it."""
        before = np.flatnonzero(units == cut)
        after = np.flatnonzero(units == cut + 1)
        # Units are numbered in a topological order, so the end of a chunk can go to the next one, and the start of
        # a chunk to the one before, without an edge that goes back.
        for members, target in ((before[::-1], cut + 1), (after, cut)):
            for size in self._sizes(members):
                moved = units.copy()
                moved[members[:size]] = target
                if self._keeps_forced_cuts(moved):
                    yield moved

    def _sizes(self, members: Ints) -> list[int]:
        """Numbers of units to move: those that end with one that takes time, and never all of them."""
        heavy = [i + 1 for i, seconds in enumerate(self._seconds[members]) if seconds > 0]
        # What takes no time goes along with its neighbour or stays: both are tried, since the traffic differs.
        sizes = {heavy[size - 1] for size in _SIZES if size < len(heavy)}
        sizes |= {heavy[size] - 1 for size in _SIZES if size < len(heavy)}
        return sorted(size for size in sizes if 0 < size < len(members))

    def _keeps_forced_cuts(self, units: Ints) -> bool:
        """Every forced cut still lies between two chunks."""
        last = int(self._side.max())
        return all(
            int(units[self._side < side].max(initial=-1)) < int(units[self._side >= side].min())
            for side in range(1, last + 1)
        )


def _a_little_less(score: Score) -> Score:
    return score[0], score[1] * (1 - 1e-6)
