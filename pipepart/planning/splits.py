"""The best split for one schedule: exact and simple starting points, then moves of ops over the cuts by simulation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipepart.errors import PartitionError
from pipepart.partition import Partition, Problem, baselines, partition
from pipepart.partition.units import unit_graph
from pipepart.planning.chunks import Priced
from pipepart.planning.memory import FittingRecompute, chunk_peaks
from pipepart.planning.pricing import Pricing
from pipepart.planning.problems import free_problem, make_problem, with_memory
from pipepart.planning.request import PlanRequest, ScheduleChoice, Shape
from pipepart.schedule import SCHEDULES, ChunkCosts, Schedule, make_schedule, step_time

__all__ = ["Case", "Improved", "Mover", "Split"]

Ints = NDArray[np.int64]
Score = tuple[float, float]
"""Bytes above the memory limit, and seconds of a step."""

_EFFORT = 300_000
"""Approximate number of actions that are simulated for the moves of one split."""
_MOST_SCORES = 150
"""Splits that are scored for the moves of one split."""
_SHORT = 4_000
"""Largest number of actions for which the first pass also simulates the simple splits."""
_SMALL = 150_000
"""Largest product of ops and chunks for which the first pass also searches a split within the memory limit. With
several chunks per stage, which share their memory, it is a third of that."""
_SIMPLE = ("even", "flops", "greedy", "parameters")
_MOVE_SIZES = (1, 2, 3, 5, 8, 13, 21, 34)
"""Numbers of units that one move takes."""


@dataclass(frozen=True, eq=False)
class Split:
    """One split with its simulated step."""

    choice: ScheduleChoice
    schedule: Schedule
    chunk_of: tuple[int, ...]
    priced: Priced
    fit: FittingRecompute
    """The chunks that recompute, and the bytes by which the worst stage exceeds its memory."""
    step: float
    method: str = ""
    others: Mapping[str, float] = field(default_factory=dict)
    """Simulated step times of the simple splits that fit."""

    @property
    def fits(self) -> bool:
        return self.fit.over <= 0

    @property
    def score(self) -> Score:
        return self.fit.over, self.step


class Case:
    """One graph in one shape, with everything that its splits have in common."""

    def __init__(self, pricing: Pricing, request: PlanRequest, shape: Shape) -> None:
        self.pricing, self.request, self.shape = pricing, request, shape
        self._partitions: dict[tuple[int, ...], Partition] = {}
        self._movers: dict[tuple[int, ...], Mover] = {}
        self._problems: dict[tuple[int, ...], Problem] = {}

    @cached_property
    def limited(self) -> bool:
        """Whether the memory of a stage is limited."""
        return any(limit < math.inf for limit in self.pricing.layout.memory)

    def least_slowest(self, chunks: int) -> float:
        """Return the least possible seconds of compute per micro-batch of the slowest stage."""
        if chunks == 1:
            return self._free_bound
        return self.pricing.least_work.total / self.shape.stages  # with several chunks a stage can hold any share

    def step_bound(self, chunks: int) -> float:
        """Return a step time that no split with so many chunks per stage can beat."""
        slowest = self._free_bound if chunks == 1 else 0.0
        return self.pricing.least_work.step_bound(self.shape.stages, self.shape.microbatches, chunks, slowest)

    def problem(self, placement: tuple[int, ...]) -> Problem:
        if placement not in self._problems:
            self._problems[placement] = make_problem(self.pricing, self.request, self.shape.microbatches, placement)
        return self._problems[placement]

    def make_schedule(self, choice: ScheduleChoice, costs: ChunkCosts | None = None) -> Schedule:
        """Return the actions of a choice; ``costs`` are those of the split, for schedules that are searched."""
        return make_schedule(
            choice.schedule,
            stages=self.shape.stages,
            microbatches=self.shape.microbatches,
            chunks=choice.chunks,
            slack=choice.slack,
            costs=costs,
        )

    def judge(self, choice: ScheduleChoice, schedule: Schedule, chunk_of: Ints) -> Split:
        """Simulate a split, with the recomputation that it needs."""
        priced = self.pricing.price(chunk_of, schedule.placement)
        if schedule.splits_backward:
            priced = self.pricing.in_two_halves(priced, chunk_of)
        if choice.schedule in SCHEDULES and SCHEDULES[choice.schedule].takes_costs:
            schedule = self.make_schedule(choice, priced.costs((False,) * schedule.chunks))
        wish = self.request.recompute
        fit = FittingRecompute((wish is True,) * schedule.chunks, 0.0, 0)
        if self.limited:
            fit = self.pricing.memory.fitting_recompute(chunk_of, priced, schedule, wish)
        step = step_time(schedule, priced.costs(fit.recompute), priced.edges)
        return Split(choice, schedule, tuple(chunk_of.tolist()), priced, fit, step)

    def best(self, choice: ScheduleChoice, moves: bool = True) -> Split:
        """Return the best split that is found for this schedule; it may exceed the memory (see `Split.fits`).

        Without ``moves`` the search is quick: long schedules are then simulated for the exact split only.
        """
        schedule = self.make_schedule(choice)
        problem = self.problem(schedule.placement)
        exact = self._exact(problem, schedule)
        starts = {exact.method: exact.chunk_of}
        if schedule.chunks > 1 and (moves or 2 * schedule.chunks * schedule.microbatches <= _SHORT):
            simple = baselines(problem, schedule.chunks)
            starts.update((name, simple[name].chunk_of) for name in sorted(simple))
        judged = {name: self.judge(choice, schedule, np.asarray(split)) for name, split in starts.items()}
        first = judged[exact.method]
        # Search a split within the memory limit if the free one exceeds it, or if another might recompute less.
        small = problem.ops * schedule.chunks <= (_SMALL if choice.chunks == 1 else _SMALL // 3)
        wanted = not first.fits and (moves or small)
        if self.limited and (wanted or (moves and small and any(first.fit.recompute))):
            roomy = self._roomy(problem, schedule)
            if roomy is not None:
                judged[f"{roomy.method}, within memory"] = self.judge(choice, schedule, np.asarray(roomy.chunk_of))
        # The simple splits ignore forced cuts: they are shown for comparison, and not chosen.
        allowed = [name for name in judged if name not in _SIMPLE or not problem.split_at]
        method = min(allowed, key=lambda name: judged[name].score)
        found = judged[method]
        if moves and schedule.chunks > 1:
            moved = self._moved(found, problem, [judged[name] for name in allowed])
            method = method if moved is found else f"{method}, moved by simulation"
            found = moved
        simple_steps = {name: split.step for name, split in judged.items() if name in _SIMPLE and split.fits}
        return dataclasses.replace(found, method=method, others=simple_steps)

    def fits(self, choice: ScheduleChoice) -> bool:
        """Return whether a split that fits into memory is found."""
        try:
            return self.best(choice, moves=False).fits
        except PartitionError:
            return False

    @cached_property
    def _free_bound(self) -> float:
        """Least possible seconds of compute per micro-batch of the slowest stage, with one chunk per stage."""
        stages = self.shape.stages
        return partition(free_problem(self.problem(tuple(range(stages)))), stages).lower_bound

    def _exact(self, problem: Problem, schedule: Schedule) -> Partition:
        """Return the split with the fastest slowest stage, which is the same for all schedules with this placement."""
        key = schedule.placement
        if key not in self._partitions:
            self._partitions[key] = partition(problem, schedule.chunks, microbatches=schedule.microbatches)
        return self._partitions[key]

    def _roomy(self, problem: Problem, schedule: Schedule) -> Partition | None:
        """Return the split with the fastest slowest stage among those that fit into memory."""
        try:
            limited = with_memory(problem, self.pricing, self.request, chunk_peaks(schedule))
            return partition(limited, schedule.chunks, microbatches=schedule.microbatches)
        except PartitionError:
            return None

    def _moved(self, best: Split, problem: Problem, starts: list[Split]) -> Split:
        """Return the best split near the two best starts, by simulation; `best` itself if no move helps."""
        schedule = best.schedule
        if schedule.placement not in self._movers:
            self._movers[schedule.placement] = Mover(problem)
        mover = self._movers[schedule.placement]
        budget = min(_MOST_SCORES, _EFFORT // (3 * schedule.chunks * schedule.microbatches))
        seen: dict[bytes, Split] = {}

        def score(chunk_of: Ints) -> Score:
            key = chunk_of.tobytes()
            if key not in seen:
                seen[key] = self.judge(best.choice, schedule, chunk_of)
            return seen[key].score

        found = best
        for start in sorted(starts, key=lambda split: split.score)[:2]:
            chunk_of = np.asarray(start.chunk_of, dtype=np.int64)
            improved = mover.improve(chunk_of, schedule.chunks, score, start.score, budget)
            budget -= improved.spent
            if improved.score < found.score:
                score(improved.chunk_of)
                found = seen[improved.chunk_of.tobytes()]
        return found


@dataclass(frozen=True, eq=False)
class Improved:
    """The result of moves."""

    chunk_of: Ints
    score: Score
    spent: int
    """Scores that were computed."""


class Mover:
    """Moves units of ops over the cuts of a split."""

    def __init__(self, problem: Problem) -> None:
        graph = unit_graph(problem)
        self._unit_of = np.asarray(graph.unit_of, dtype=np.int64)
        self._units = len(graph.members)
        seconds = np.asarray(problem.forward + problem.backward)
        self._seconds = graph.sums(seconds)
        self._side = np.asarray(graph.side)

    def improve(
        self, chunk_of: Ints, chunks: int, score: Callable[[Ints], Score], known: Score, budget: int
    ) -> Improved:
        """Take the best move over each cut in turn until none helps or the budget of scores is spent.

        Nothing is random: the same input gives the same split.
        """
        units = np.zeros(self._units, dtype=np.int64)
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
                    if found < (best[0], best[1] * (1 - 1e-6)):
                        best, taken = found, candidate
                if taken is not None:
                    units, changed = taken, True
        return Improved(units[self._unit_of], best, spent)

    def _over(self, units: Ints, cut: int) -> Iterator[Ints]:
        """Yield splits with the last units before the cut moved behind it, or the first units behind it moved before it."""
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
        """Return numbers of units to move, such that a few units with work move, and never all units."""
        heavy = [i + 1 for i, seconds in enumerate(self._seconds[members]) if seconds > 0]
        # A unit that takes no time goes with its neighbour or stays. Both are tried, since the traffic differs.
        sizes = {heavy[size - 1] for size in _MOVE_SIZES if size < len(heavy)}
        sizes |= {heavy[size] - 1 for size in _MOVE_SIZES if size < len(heavy)}
        return sorted(size for size in sizes if 0 < size < len(members))

    def _keeps_forced_cuts(self, units: Ints) -> bool:
        """Return whether every forced cut still lies between two chunks."""
        last = int(self._side.max())
        return all(
            int(units[self._side < side].max(initial=-1)) < int(units[self._side >= side].min())
            for side in range(1, last + 1)
        )
