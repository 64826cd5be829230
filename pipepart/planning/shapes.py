"""The auto planner: replicas x stages x chunks x micro-batches x schedule x recompute, the best simulated step.

::

    all shapes -> estimate of each (balanced stages, closed formulas) -> in that order: split, simulate
               -> leave out what a bound excludes                      -> the few best: moves by simulation
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipepart.cost import OpCosts
from pipepart.cost.cluster import Cluster
from pipepart.errors import PartitionError, PlanError
from pipepart.graph import OpGraph
from pipepart.planning.assembly import finish
from pipepart.planning.bounds import step_bound, work_and_path
from pipepart.planning.layout import Layout
from pipepart.planning.memory_shortage import nothing_fits
from pipepart.planning.plan import Plan
from pipepart.planning.planner import named, weighed
from pipepart.planning.pricing import ParameterSizes, Pricing
from pipepart.planning.request import Recipe, Request, recipes
from pipepart.planning.sources import Costs
from pipepart.planning.splits import Case, Split

__all__ = ["Wish", "search"]

_PER_STAGE = (1, 2, 4, 8)
"""Micro-batches per stage that are tried."""
_FAR = 1.25
"""An estimate so much above the best simulated step is not simulated any more."""
_MOST = 48
"""Candidates that are split and simulated."""
_MOST_ACTIONS = 60_000
"""Schedules of more actions are tried only where there is no shorter one."""
_MOST_CUTTING = 200_000
"""The same for ops times chunks: what the search for a cut takes grows with it."""
_EFFORT = 1_000_000
"""Actions that are simulated in all before the moves; the search for a cut counts for some, too."""
_MOVED = 3
"""Candidates that are improved by moves at the end,"""
_NEAR = 1.05
"""if they are so near to the best."""


@dataclass(frozen=True)
class Wish:
    """What is fixed and what is free."""

    batch_size: int
    """Samples of one step, over all replicas,"""
    devices: int
    stages: int | str = "auto"
    replicas: int | str = "auto"
    microbatches: int | str = "auto"
    request: Request = field(default_factory=lambda: Request(1))
    """Schedule, chunks, slack, recompute, memory and constraints; its shape is not read."""
    each_replica: bool = False
    """or of each replica: then shapes are compared by the seconds of a step for as many samples."""

    def share(self, replicas: int) -> int:
        """Samples of one replica."""
        return self.batch_size if self.each_replica else max(1, -(-self.batch_size // replicas))

    def weight(self, replicas: int) -> float:
        """By which seconds of a step are multiplied to compare shapes."""
        return 1.0 / replicas if self.each_replica else 1.0


@dataclass(frozen=True)
class _Candidate:
    stages: int
    replicas: int
    microbatches: int
    size: int
    recipe: Recipe
    estimate: float
    """Seconds of a step, weighed by its samples;"""
    bound: float
    """no split has less."""

    @property
    def actions(self) -> int:
        return 2 * self.stages * self.recipe.chunks * self.microbatches

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.stages, self.replicas, self.size


@dataclass(frozen=True, eq=False)
class _Search:
    graph: OpGraph
    source: Costs
    sizes: ParameterSizes
    cluster: Cluster
    wish: Wish
    frozen: Collection[str]
    cases: dict[tuple[int, int, int], Case]

    def case(self, stages: int, replicas: int, size: int, microbatches: int) -> Case:
        key = (stages, replicas, size)
        if key not in self.cases:
            request = replace(self.wish.request, stages=stages, replicas=replicas, microbatches=microbatches)
            layout = Layout.on(self.cluster, stages, replicas, memory_limit=request.memory_limit)
            costs = self._costs(layout.kinds, size)
            self.cases[key] = Case(
                Pricing(self.graph, costs, self.sizes, layout, request.optimizer_factor, self.frozen), request
            )
        return self.cases[key]

    def _costs(self, kinds: Sequence[str], size: int) -> tuple[OpCosts, ...]:
        if len(set(kinds)) == 1:
            return (self.source.at(size, kinds[0]),)
        return tuple(self.source.at(size, kind) for kind in kinds)

    def candidates(self) -> list[_Candidate]:
        """All that the wish allows, the most promising first."""
        found = [
            candidate
            for stages, replicas in self._meshes()
            for microbatches, size in self._microbatches(stages, replicas)
            for candidate in self._ways(stages, replicas, microbatches, size)
        ]
        return sorted(found, key=lambda c: (c.estimate, c.stages, c.microbatches))

    def _meshes(self) -> Iterator[tuple[int, int]]:
        wish = self.wish
        if wish.stages != "auto" and wish.replicas != "auto":
            yield int(wish.stages), int(wish.replicas)
            return
        if wish.stages != "auto":
            yield int(wish.stages), _divided(wish.devices, int(wish.stages), "stages")
            return
        if wish.replicas != "auto":
            yield _divided(wish.devices, int(wish.replicas), "replicas"), int(wish.replicas)
            return
        for stages in range(1, wish.devices + 1):
            few = wish.each_replica or wish.devices // stages <= wish.batch_size
            if wish.devices % stages == 0 and (stages == 1 or few):
                yield stages, wish.devices // stages

    def _microbatches(self, stages: int, replicas: int) -> list[tuple[int, int]]:
        """(micro-batches, size of one) for a replica's share of the batch."""
        share = self.wish.share(replicas)
        if self.wish.microbatches != "auto":
            count = int(self.wish.microbatches)
            if count > share:
                return []
            return [(count, -(-share // count))]
        if stages == 1:
            counts = [1] if self.wish.request.memory_limit is None and not self._tight(share) else [1, 2, 4, 8, 16, 32]
        else:
            counts = [stages * each for each in _PER_STAGE]
        sizes = sorted({-(-share // min(count, share)) for count in counts}, reverse=True)
        return sorted({(-(-share // size), size) for size in sizes})

    def _tight(self, share: int) -> bool:
        """Whether the whole model with the whole share could be too large for a device."""
        kind = self.cluster.devices[0].name
        costs = self.source.at(share, kind)
        state = sum(size for _, size in self.sizes.values()) * (2 + self.wish.request.optimizer_factor)
        return state + sum(costs.saved_bytes) > min(device.memory for device in self.cluster.devices)

    def _ways(self, stages: int, replicas: int, microbatches: int, size: int) -> Iterator[_Candidate]:
        case = self.case(stages, replicas, size, microbatches)
        request, layout = case.request, case.pricing.layout
        work, path = work_and_path(case.pricing)
        costs = case.pricing.costs
        f, i, w = (
            min(math.fsum(getattr(one, name)) for one in costs) / stages
            for name in ("forward", "backward_input", "backward_weight")
        )
        parameters = sum(bytes_ for _, bytes_ in self.sizes.values())
        state = parameters * (2 + request.optimizer_factor) / stages
        saved = math.fsum(costs[0].saved_bytes) / stages
        room = max(layout.memory)
        if state > room and self.wish.stages == "auto":
            return  # not even the parameters fit
        reduce = layout.reduce_seconds(0, parameters / stages)
        weight = self.wish.weight(replicas)
        for recipe in recipes(request):
            held = _bubble(recipe, stages, microbatches, f, i, w)[1]
            full = state + held * saved > room
            again = request.recompute is True or (request.recompute == "auto" and full)
            back = i + f if again else i  # a forward that is run again comes with the gradient of the inputs
            estimate = microbatches * (f + back + w) + _bubble(recipe, stages, microbatches, f, back, w)[0] + reduce
            if full and not again:
                estimate *= 4  # it will hardly fit: last
            chunked = recipe.chunks > 1
            bound = max(microbatches * work / stages, path if chunked else 0.0)
            if not chunked:
                bound = step_bound(work, path, stages, microbatches)
            yield _Candidate(stages, replicas, microbatches, size, recipe, estimate * weight, bound * weight)


def search(
    graph: OpGraph,
    source: Costs,
    sizes: ParameterSizes,
    cluster: Cluster,
    wish: Wish,
    *,
    frozen: Collection[str] = (),
) -> Plan:
    """The best plan for a cluster and a batch over everything that is free."""
    run = _Search(graph, source, sizes, cluster, wish, frozen, {})
    candidates = run.candidates()
    if not candidates:
        raise PlanError(_no_shape(wish, sizes, cluster))
    judged: list[tuple[_Candidate, Split]] = []
    refused: PartitionError | None = None
    best, spent = math.inf, 0
    long = [c for c in candidates if _is_long(c, graph)]
    for candidate in [c for c in candidates if not _is_long(c, graph)] + long:
        found = best < math.inf
        enough = spent > _EFFORT or len(judged) >= _MOST
        if found and (candidate.estimate > best * _FAR or _is_long(candidate, graph) or enough):
            break
        if candidate.bound >= best:
            continue
        if spent > 4 * _EFFORT or len(judged) >= 4 * _MOST:
            break  # nothing has fitted so far, and what comes is less promising
        spent += candidate.actions + len(graph) * candidate.stages * candidate.recipe.chunks // 3
        try:
            split = run.cases[candidate.shape].best(candidate.recipe, moves=False)
        except PartitionError as error:
            refused = refused or error
            continue
        judged.append((candidate, split))
        if split.over <= 0:
            best = min(best, split.step * wish.weight(candidate.replicas))
    if not judged:
        assert refused is not None
        raise refused

    def worth(pair: tuple[_Candidate, Split]) -> tuple[float, float, float]:
        return weighed(pair[1], wish.weight(pair[0].replicas))

    ranked = sorted(judged, key=worth)
    over, step, _ = worth(ranked[0])
    near = [pair for pair in ranked[:_MOVED] if worth(pair) <= (over, step * _NEAR)]
    top = [(c, run.cases[c.shape].best(c.recipe)) for c, _ in near or ranked[:1]]
    candidate, split = min(top, key=worth)
    case = run.cases[candidate.shape]
    if split.over > 0:
        raise nothing_fits(case, split)
    return finish(case, split, candidate.size, _tried(judged, candidate, wish), cluster.name)


def _is_long(candidate: _Candidate, graph: OpGraph) -> bool:
    cutting = len(graph) * candidate.stages * candidate.recipe.chunks
    return candidate.actions > _MOST_ACTIONS or (cutting > _MOST_CUTTING and candidate.stages > 1)


def _bubble(recipe: Recipe, p: int, m: int, f: float, i: float, w: float) -> tuple[float, float]:
    """Of balanced stages: seconds of bubble, and micro-batches whose activations the first stage holds."""
    gap, v = p - 1, recipe.chunks
    whole = gap * (f + i + w)
    kinds = {
        "gpipe": (whole / v, float(m)),
        "1f1b": (whole, float(min(m, p + recipe.slack))),
        "interleaved": (whole / v, min(float(m), p + gap / v)),
        "zb_h1": (gap * max(f + i - w, 0.0), float(min(m, p))),
        "zb_h2": (gap * max(f + i - 2 * w, 0.0), float(min(m, 2 * p - 1))),
        "zb_v": (gap * f / 2, float(min(m, p))),
    }
    return kinds.get(recipe.schedule, kinds["1f1b"])  # of a schedule from a file only the simulation knows more


def _divided(devices: int, by: int, name: str) -> int:
    if devices % by:
        raise PlanError(
            f"devices must be a multiple of {name} (devices = replicas x stages): got devices={devices}, {name}={by}. "
            f"Use devices={-(-devices // by) * by}, or another number of {name}."
        )
    return devices // by


def _tried(judged: Sequence[tuple[_Candidate, Split]], best: _Candidate, wish: Wish) -> tuple[tuple[str, float], ...]:
    """The best of every other mesh and schedule, as said in the plan: in seconds for as many samples as the plan's."""
    found: dict[str, float] = {}
    for candidate, split in judged:
        if split.over > 0 or candidate is best:
            continue
        name = (
            f"{candidate.replicas} x {candidate.stages}, {named(split.recipe)}, {candidate.microbatches} micro-batches"
        )
        seconds = split.step * wish.weight(candidate.replicas) / wish.weight(best.replicas)
        found[name] = min(seconds, found.get(name, math.inf))
    return tuple(sorted(found.items(), key=lambda item: item[1])[:12])


def _no_shape(wish: Wish, sizes: ParameterSizes, cluster: Cluster) -> str:
    if wish.microbatches != "auto":
        return (
            f"a batch of {wish.batch_size} cannot be cut into {wish.microbatches} micro-batches on any shape of "
            f"{wish.devices} device(s): use fewer micro-batches or a larger batch"
        )
    state = sum(size for _, size in sizes.values()) * (2 + wish.request.optimizer_factor)
    room = max(device.memory for device in cluster.devices)
    if wish.request.memory_limit is not None:
        room = min(room, wish.request.memory_limit)
    need = math.ceil(state / room)
    return (
        f"the model does not fit on {wish.devices} device(s) of {room / 1e9:.2f} GB: weights, gradients and optimizer state "
        f"are {state / 1e9:.2f} GB, {state / wish.devices / 1e9:.2f} GB a stage with all devices in one pipeline. "
        f"More stages would fit: use devices={need} or more."
    )
