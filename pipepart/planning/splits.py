"""The best split for one way to run it: start from the exact one and the simple ones, then move by simulation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipepart.errors import PartitionError
from pipepart.partition import Partition, Problem, baselines, partition
from pipepart.planning.memory_model import FittingRecompute, chunk_peaks
from pipepart.planning.moves import Ints, Mover, Score
from pipepart.planning.priced import Priced
from pipepart.planning.pricing import Pricing
from pipepart.planning.problems import free_problem, make_problem, with_memory
from pipepart.planning.request import PlanRequest, Recipe, Shape
from pipepart.schedule import Schedule, make_schedule, step_time

__all__ = ["Case", "Split"]

_EFFORT = 300_000
"""About how many actions are simulated for the moves of one split."""
_MOST_SCORES = 150
_SHORT = 4_000
"""Actions of a schedule that is simulated for all simple splits, too, at a quick look."""
_SMALL = 150_000
"""Ops times chunks for which a cut within memory is searched at a quick look, too; a third of it with several
chunks per stage, which share their memory."""
_SIMPLE = ("even", "flops", "greedy", "parameters")


@dataclass(frozen=True, eq=False)
class Split:
    """One split with all that was found out about it."""

    recipe: Recipe
    schedule: Schedule
    chunk_of: tuple[int, ...]
    recompute: tuple[bool, ...]
    priced: Priced
    step: float
    over: float
    """Bytes by which the worst stage does not fit; 0: all fit."""
    worst: int
    """That stage."""
    method: str = ""
    others: Mapping[str, float] = field(default_factory=dict)
    """Simulated step times of the simple splits that fit."""

    @property
    def score(self) -> Score:
        return self.over, self.step


class Case:
    """One graph in one shape: all that its splits have in common, kept for all recipes."""

    def __init__(self, pricing: Pricing, request: PlanRequest, shape: Shape) -> None:
        self.pricing, self.request, self.shape = pricing, request, shape
        self._partitions: dict[tuple[int, ...], Partition] = {}
        self._movers: dict[tuple[int, ...], Mover] = {}
        self._problems: dict[tuple[int, ...], Problem] = {}

    @cached_property
    def limited(self) -> bool:
        """Some stage has a limit to its memory."""
        return any(limit < math.inf for limit in self.pricing.layout.memory)

    @cached_property
    def free_bound(self) -> float:
        """Seconds of compute per micro-batch that the slowest stage has at least, if stages have one chunk each."""
        stages = self.shape.stages
        return partition(free_problem(self.problem(tuple(range(stages)))), stages).lower_bound

    def problem(self, placement: tuple[int, ...]) -> Problem:
        if placement not in self._problems:
            self._problems[placement] = make_problem(self.pricing, self.request, self.shape.microbatches, placement)
        return self._problems[placement]

    def make_schedule(self, recipe: Recipe) -> Schedule:
        return make_schedule(
            recipe.schedule,
            stages=self.shape.stages,
            microbatches=self.shape.microbatches,
            chunks=recipe.chunks,
            slack=recipe.slack,
        )

    def slowest(self, split: Split) -> float:
        """Seconds of compute per micro-batch of the slowest stage, without recomputation."""
        priced = split.priced
        work = [0.0] * self.shape.stages
        for chunk, stage in enumerate(priced.placement):
            work[stage] += priced.chunks[chunk].compute
        return max(work)

    def judge(self, recipe: Recipe, schedule: Schedule, chunk_of: Ints) -> Split:
        """What a split costs in simulation, with what must be recomputed."""
        priced = self.pricing.price(chunk_of, schedule.placement)
        if schedule.splits_backward:
            priced = self.pricing.in_two_halves(priced, chunk_of)
        wish = self.request.recompute
        fit = FittingRecompute((wish is True,) * schedule.chunks, 0.0, 0)
        if self.limited:
            fit = self.pricing.memory.fitting_recompute(chunk_of, priced, schedule, wish)
        step = step_time(schedule, priced.costs(fit.recompute), priced.edges)
        return Split(
            recipe, schedule, tuple(int(c) for c in chunk_of), fit.recompute, priced, step, fit.over, fit.worst
        )

    def best(self, recipe: Recipe, moves: bool = True) -> Split:
        """The best split that is found for this recipe; it may not fit into memory (see `Split.over`).

        Without ``moves`` it is a quick look: long schedules are then simulated for the exact split only.
        """
        schedule = self.make_schedule(recipe)
        problem = self.problem(schedule.placement)
        exact = self._exact(problem, schedule)
        starts = {exact.method: exact.chunk_of}
        if schedule.chunks > 1 and (moves or 2 * schedule.chunks * schedule.microbatches <= _SHORT):
            simple = baselines(problem, schedule.chunks)
            starts.update((name, simple[name].chunk_of) for name in sorted(simple))
        judged = {name: self.judge(recipe, schedule, np.asarray(split)) for name, split in starts.items()}
        first = judged[exact.method]
        # A cut that knows of the memory: where the free one does not fit, and where another might recompute less.
        small = problem.ops * schedule.chunks <= (_SMALL if recipe.chunks == 1 else _SMALL // 3)
        wanted = first.over > 0 and (moves or small)
        if self.limited and (wanted or (moves and small and any(first.recompute))):
            roomy = self._roomy(problem, schedule)
            if roomy is not None:
                name = f"{roomy.method}, within memory"
                judged[name] = self.judge(recipe, schedule, np.asarray(roomy.chunk_of))
        # The simple splits know nothing of forced cuts: they are compared with, not taken.
        allowed = [name for name in judged if name not in _SIMPLE or not problem.split_at]
        method = min(allowed, key=lambda name: judged[name].score)
        found = judged[method]
        if moves and schedule.chunks > 1:
            found, moved = self._moved(found, schedule, problem, [judged[name] for name in allowed])
            method = f"{method}, moved by simulation" if moved else method
        simple_steps = {name: split.step for name, split in judged.items() if name in _SIMPLE and split.over <= 0}
        return dataclasses.replace(found, method=method, others=simple_steps)

    def fits(self, recipe: Recipe) -> bool:
        """Whether a split that fits into memory is found."""
        try:
            return self.best(recipe, moves=False).over <= 0
        except PartitionError:
            return False

    def _exact(self, problem: Problem, schedule: Schedule) -> Partition:
        """The split with the fastest slowest stage; the same for all schedules with this placement."""
        key = schedule.placement
        if key not in self._partitions:
            self._partitions[key] = partition(problem, schedule.chunks, microbatches=schedule.microbatches)
        return self._partitions[key]

    def _roomy(self, problem: Problem, schedule: Schedule) -> Partition | None:
        try:
            limited = with_memory(problem, self.pricing, self.request, chunk_peaks(schedule))
            return partition(limited, schedule.chunks, microbatches=schedule.microbatches)
        except PartitionError:
            return None

    def _moved(self, best: Split, schedule: Schedule, problem: Problem, starts: list[Split]) -> tuple[Split, bool]:
        """The best split near the two best starts, by simulation; and whether any move helped."""
        if schedule.placement not in self._movers:
            self._movers[schedule.placement] = Mover(problem)
        mover = self._movers[schedule.placement]
        actions = 3 * schedule.chunks * schedule.microbatches
        budget = min(_MOST_SCORES, _EFFORT // actions)
        seen: dict[bytes, Split] = {}

        def score(chunk_of: Ints) -> Score:
            key = chunk_of.tobytes()
            if key not in seen:
                seen[key] = self.judge(best.recipe, schedule, chunk_of)
            return seen[key].score

        ranked = sorted(starts, key=lambda split: split.score)[:2]
        found = best
        for start in ranked:
            chunk_of, value, spent = mover.improve(
                np.asarray(start.chunk_of, dtype=np.int64), schedule.chunks, score, start.score, budget
            )
            budget -= spent
            if value < found.score:
                score(chunk_of)
                found = seen[chunk_of.tobytes()]
        return found, found is not best
