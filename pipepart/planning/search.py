"""The search for a plan: replicas x stages x chunks x micro-batches x schedule x recompute, the best simulated step.

::

    all candidates -> estimate of each (balanced stages, closed formulas) -> in that order: split, simulate
                   -> leave out what a bound excludes                      -> the few best: moves by simulation

`plan`, ``pipepart plan`` and a fit all come here. A fit has a fixed mesh, and numbers of micro-batches
that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipepart.errors import PartitionError
from pipepart.graph import OpGraph
from pipepart.planning.assembly import finish
from pipepart.planning.candidates import Candidate, SearchSpace
from pipepart.planning.memory_shortage import nothing_fits
from pipepart.planning.parameter_uses import ParameterSizes
from pipepart.planning.plan import Plan
from pipepart.planning.request import PlanRequest, Recipe
from pipepart.planning.sources import Costs
from pipepart.planning.splits import Split
from pipepart.schedule import peak_activations

__all__ = ["search"]

_CLEARLY = 0.96
"""Part of the step of the usual number of micro-batches that another number may take to be preferred: no measurement gives
the same figure twice."""
_MORE_PARTS = 0.004
"""Price of every further chunk and of a split backward, as a part of the step: there are more actions and messages, each of
which may be late."""
_FAR = 1.25
"""Factor above the best simulated step from which on estimates are not simulated any more."""
_MOST = 48
"""Candidates that are split and simulated."""
_MOST_ACTIONS = 60_000
"""Schedules of more actions are tried only where there is no shorter one."""
_MOST_CUTTING = 200_000
"""The same for ops times chunks: what the search for a cut takes grows with it."""
_EFFORT = 1_000_000
"""Actions that are simulated in all before the moves; the search for a cut counts for some, too."""
_MOVED = 4
"""Candidates that are improved by moves at the end,"""
_NEAR = 1.08
"""if they are so near to the best."""


@dataclass(frozen=True, eq=False)
class _Judged:
    """A candidate with its best split so far."""

    candidate: Candidate
    split: Split
    weight: float
    """Factor of its step that makes it comparable with those of other meshes."""

    @property
    def fits(self) -> bool:
        return self.split.over <= 0

    @property
    def step(self) -> float:
        return self.split.step * self.weight

    def worth(self) -> tuple[float, float, float]:
        """The order of splits: those that fit, then the step (with a small price for its parts), then fewer activations."""
        split = self.split
        parts = split.recipe.chunks - 1 + (1 if split.schedule.splits_backward else 0)
        held = peak_activations(split.schedule, split.priced.costs(split.recompute).activation)
        return split.over, round(self.step * (1 + _MORE_PARTS * parts), 9), max(held, default=0.0)


def search(
    graph: OpGraph, source: Costs, sizes: ParameterSizes, request: PlanRequest, *, frozen: Collection[str] = ()
) -> Plan:
    """The best plan over everything that the request leaves open.

    Where the request names numbers of micro-batches, the plan has the usual one, unless another is clearly faster or fits into
    memory where the usual one does not.
    """
    run = _Search(SearchSpace(graph, source, sizes, request, frozen))
    candidates = run.space.candidates()
    if not candidates:
        raise run.space.nothing()
    usual = run.best([c for c in candidates if c.usual])
    enough = _CLEARLY * usual.step if usual is not None and usual.fits else math.inf
    other = run.best([c for c in candidates if not c.usual], enough)
    chosen = usual or other
    if chosen is None:
        assert run.refused is not None
        raise run.refused
    if other is not None and other.fits and (not chosen.fits or other.step < enough):
        chosen = other
    case = run.space.case(chosen.candidate.shape)
    if not chosen.fits:
        raise nothing_fits(case, chosen.split)
    return finish(case, chosen.split, _tried(run.judged, chosen))


class _Search:
    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.judged: list[_Judged] = []
        self.refused: PartitionError | None = None
        """The first refusal: a model of few ops may be cut into p, but not into 2 p."""

    def best(self, candidates: Sequence[Candidate], below: float = math.inf) -> _Judged | None:
        """The best of these candidates; None if the model cannot be cut for any, or if none can have a step below."""
        looked = self._looked_at(candidates, below)
        self.judged += looked
        if not looked:
            return None
        ranked = sorted(looked, key=_Judged.worth)
        near = ranked[:_MOVED]
        if ranked[0].fits:
            # Moves may make a split fit that does not fit yet.
            limit = ranked[0].worth()[1] * _NEAR
            some = [one for one in ranked if one.step <= limit]
            near = [one for one in some if one.fits][:_MOVED] + [one for one in some if not one.fits][:_MOVED]
        moved = [self._judge(one.candidate) for one in near]
        return min([*moved, *ranked], key=_Judged.worth)

    def _looked_at(self, candidates: Sequence[Candidate], best: float) -> list[_Judged]:
        """A quick look at the candidates, the most promising first, until none can be better."""
        judged: list[_Judged] = []
        spent, ops = 0, len(self.space.graph)
        for candidate in sorted(candidates, key=lambda c: _is_long(c, ops)):
            found = best < math.inf
            enough = spent > _EFFORT or len(judged) >= _MOST
            if found and (candidate.estimate > best * _FAR or _is_long(candidate, ops) or enough):
                break
            if candidate.bound >= best:
                continue
            if spent > 4 * _EFFORT or len(judged) >= 4 * _MOST:
                break  # nothing has fitted so far, and what comes is less promising
            spent += candidate.actions + ops * candidate.shape.stages * candidate.recipe.chunks // 3
            try:
                judged.append(self._judge(candidate, moves=False))
            except PartitionError as error:
                self.refused = self.refused or error
                continue
            if judged[-1].fits:
                best = min(best, judged[-1].step)
        return judged

    def _judge(self, candidate: Candidate, moves: bool = True) -> _Judged:
        split = self.space.case(candidate.shape).best(candidate.recipe, moves=moves)
        return _Judged(candidate, split, self.space.request.weight(candidate.shape.replicas))


def _is_long(candidate: Candidate, ops: int) -> bool:
    cutting = ops * candidate.shape.stages * candidate.recipe.chunks
    return candidate.actions > _MOST_ACTIONS or (cutting > _MOST_CUTTING and candidate.shape.stages > 1)


def _tried(judged: Sequence[_Judged], best: _Judged) -> tuple[tuple[str, float], ...]:
    """The best of every other mesh, recipe and number of micro-batches: seconds for as many samples as the plan's."""
    meshes = len({(one.candidate.shape.stages, one.candidate.shape.replicas) for one in judged}) > 1
    counts = len({one.candidate.shape.microbatches for one in judged}) > 1
    found: dict[str, float] = {}
    for one in judged:
        if not one.fits or one.candidate is best.candidate:
            continue
        shape = one.candidate.shape
        parts = [f"{shape.replicas} x {shape.stages}"] if meshes else []
        parts.append(_named(one.split.recipe))
        if meshes or counts:
            parts.append(f"{shape.microbatches} micro-batches")
        name = ", ".join(parts)
        found[name] = min(one.step / best.weight, found.get(name, math.inf))
    return tuple(sorted(found.items(), key=lambda item: item[1])[:12])


def _named(recipe: Recipe) -> str:
    """A recipe as tables and messages call it."""
    more = f", {recipe.chunks} chunks" if recipe.chunks > 1 else ""
    return recipe.schedule + more + (f", slack {recipe.slack}" if recipe.slack else "")
