"""The search for a plan: replicas x stages x chunks x micro-batches x schedule x recompute, the best simulated step.

::

    all candidates -> an estimate of each -> in that order: split, simulate, skip those that a bound excludes
                   -> the few best: moves by simulation -> the best one

`plan`, ``pipepart plan`` and a fit use this search. A fit has a fixed mesh, and numbers of micro-batches that were
measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pipepart.errors import PartitionError
from pipepart.graph import OpGraph
from pipepart.planning.candidates import Candidate, SearchSpace
from pipepart.planning.finish import make_plan, nothing_fits
from pipepart.planning.head_choice import planned_with_head
from pipepart.planning.head_mode import HeadMode
from pipepart.planning.memory import ParameterSize
from pipepart.planning.plan import Plan
from pipepart.planning.request import PlanRequest
from pipepart.planning.sources import Costs
from pipepart.planning.splits import Split
from pipepart.planning.sync_choice import planned_with_sync
from pipepart.planning.sync_mode import SyncMode
from pipepart.schedule import peak_activations

__all__ = ["search"]

_CLEARLY = 0.96
"""Another number of micro-batches is preferred if its step takes at most this part of the step of the usual number, since
no measurement gives the same figure twice."""
_MORE_PARTS = 0.004
"""Penalty for every further chunk and for a split backward, as a part of the step: more actions and messages may be late."""
_FAR = 1.25
"""Candidates whose estimate is above the best simulated step by this factor are not simulated."""
_MOST = 48
"""Number of candidates that are split and simulated."""
_MOST_ACTIONS = 60_000
"""Schedules of more actions are tried only if there is no shorter one."""
_MOST_CUTTING = 200_000
"""Candidates with a larger product of ops and chunks are also tried only if there is no other: searching a cut takes long."""
_EFFORT = 1_000_000
"""Actions that are simulated in total before the moves; the search for a cut counts as some of them."""
_MOVED = 4
"""Number of candidates that are improved by moves at the end."""
_NEAR = 1.08
"""Factor above the best step up to which candidates are improved by moves."""


@dataclass(frozen=True, eq=False)
class _Judged:
    """A candidate with its best split so far."""

    candidate: Candidate
    split: Split
    weight: float
    """Factor of its step that makes it comparable with other meshes."""

    @property
    def fits(self) -> bool:
        return self.split.fits

    @property
    def step(self) -> float:
        return self.split.step * self.weight

    def worth(self) -> tuple[float, float, float]:
        """Return the order of splits: those that fit, then by step (with a small penalty for parts), then by activations."""
        split = self.split
        parts = split.choice.chunks - 1 + (1 if split.schedule.splits_backward else 0)
        held = peak_activations(split.schedule, split.priced.costs(split.fit.recompute).activation)
        return split.fit.over, round(self.step * (1 + _MORE_PARTS * parts), 9), max(held, default=0.0)


def search(
    graph: OpGraph,
    source: Costs,
    sizes: Mapping[str, ParameterSize],
    request: PlanRequest,
    *,
    frozen: Collection[str] = (),
) -> Plan:
    """Return the best plan over all choices that the request leaves open.

    If the request names numbers of micro-batches, the plan has the usual one, unless another one is clearly faster or alone
    fits into memory.
    """
    if SyncMode.of(request.sync).mode == "auto":
        return planned_with_sync(lambda fixed: search(graph, source, sizes, fixed, frozen=frozen), request)
    if HeadMode.of(request.head).looks_for_heads:
        whole = replace(request, head="whole")
        return planned_with_head(lambda g, costs: search(g, costs, sizes, whole, frozen=frozen), graph, source, request)
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
    return make_plan(case, chosen.split, _tried(run.judged, chosen))


class _Search:
    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.judged: list[_Judged] = []
        self.refused: PartitionError | None = None
        """The first refusal: a model of few ops can be divided into p chunks, but not into 2 p."""

    def best(self, candidates: Sequence[Candidate], below: float = math.inf) -> _Judged | None:
        """Return the best of these candidates; None if none can be split, or if none can have a step below the limit."""
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
        """Look at the candidates quickly, the most promising first, until none can be better."""
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
                break  # no candidate has fitted so far, and the rest is less promising
            spent += candidate.actions + ops * candidate.shape.stages * candidate.choice.chunks // 3
            try:
                judged.append(self._judge(candidate, moves=False))
            except PartitionError as error:
                self.refused = self.refused or error
                continue
            if judged[-1].fits:
                best = min(best, judged[-1].step)
        return judged

    def _judge(self, candidate: Candidate, moves: bool = True) -> _Judged:
        split = self.space.case(candidate.shape).best(candidate.choice, moves=moves)
        return _Judged(candidate, split, self.space.request.weight(candidate.shape.replicas))


def _is_long(candidate: Candidate, ops: int) -> bool:
    cutting = ops * candidate.shape.stages * candidate.choice.chunks
    return candidate.actions > _MOST_ACTIONS or (cutting > _MOST_CUTTING and candidate.shape.stages > 1)


def _tried(judged: Sequence[_Judged], best: _Judged) -> tuple[tuple[str, float], ...]:
    """Return the best step of every other mesh, schedule and number of micro-batches, for as many samples as the plan's."""
    meshes = len({(one.candidate.shape.stages, one.candidate.shape.replicas) for one in judged}) > 1
    counts = len({one.candidate.shape.microbatches for one in judged}) > 1
    found: dict[str, float] = {}
    for one in judged:
        if not one.fits or one.candidate is best.candidate:
            continue
        shape = one.candidate.shape
        parts = [f"{shape.replicas} x {shape.stages}"] if meshes else []
        parts.append(str(one.split.choice))
        if meshes or counts:
            parts.append(f"{shape.microbatches} micro-batches")
        name = ", ".join(parts)
        found[name] = min(one.step / best.weight, found.get(name, math.inf))
    return tuple(sorted(found.items(), key=lambda item: item[1])[:12])
