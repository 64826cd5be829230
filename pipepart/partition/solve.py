"""The partitioner: reductions, then an exact search where it can be afforded, and a bound always.

::

    problem -> classes -> reduced instance -> slices of several orders  -> a first answer
                                           -> all downsets, if few      -> the best answer, proved
                                           -> else moves near the first -> a better answer, with its gap
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipepart.errors import PartitionError
from pipepart.partition.improve import improve, state_mask
from pipepart.partition.instance import NEVER, Instance
from pipepart.partition.prepare import Prepared, classes, full_instance, prepare
from pipepart.partition.problem import Problem
from pipepart.partition.result import Partition, make_partition
from pipepart.partition.route import Route, make_route
from pipepart.partition.search import Found, States, best_path, pairs_to_try
from pipepart.partition.shortage import nothing_fits

__all__ = ["partition"]

_GROWTH = (1.01, 1.03, 1.08, 1.2, 1.5, 2.0, 4.0)
"""Limits to try, over the bound: small limits make small windows."""
_STEP = 1.1
"""A limit so near to the known answer is left out: it saves too little."""
_WIDEST = 1500
"""States per window of a linear order; wider windows are thinned."""
_NO_LIMIT = 1 << 40
_MOST_PAIRS = 40_000_000
"""Chunks that one exact search may look at: a few seconds."""
_MANY_PAIRS = 8_000_000
_TENTHS = (3, 7, 2, 8, 4, 6, 1, 9)
"""Parts of a stage's memory for its first chunk, tried where nothing else fits."""


@dataclass(frozen=True, eq=False)
class _Outcome:
    states: States
    found: Found
    bound: int
    """Ticks that no bottleneck can be below."""
    method: str


def partition(problem: Problem, chunks: int, *, microbatches: int = 1, slack: float = 1e-3) -> Partition:
    """Cut a model into chunks with the smallest bottleneck; among (nearly) equal ones the one with less traffic.

    ``slack``: by how much (relative) the bottleneck may be worse if that lowers the traffic. The answer depends on
    nothing but the arguments: all limits on the effort are counts, none is a time.
    """
    started = time.perf_counter()
    if chunks < 1 or microbatches < 1:
        raise PartitionError(f"partition: {chunks} chunks and {microbatches} micro-batches; expected at least 1 each")
    problem.fits_chunks(chunks)
    graph = classes(problem)
    if len(graph.members) < chunks and not problem.fewer:
        raise PartitionError(
            f"partition: {chunks} stages were asked for, but the model can be cut into {len(graph.members)} at most"
            f"{' (some ops must stay together)' if problem.colocated else ''}: ask for {len(graph.members)} or fewer"
        )
    linked = chunks if len(problem.links) > 1 else 0
    full = full_instance(problem, linked, True)
    require_work = problem.fewer or int(full.counts.sum()) >= chunks
    if not require_work:
        full = full_instance(problem, linked, False)
    route = make_route(problem, full, chunks, microbatches)
    matters = memory_matters(full, route)
    if not matters:
        route = route.without_memory()
    prepared = prepare(problem, linked, require_work, matters)
    outcome = _search(prepared, route, slack)
    if outcome is not None and problem.placement is not None and matters:
        outcome = _share_memory(problem, prepared, outcome, chunks, microbatches, slack)
    prepared.forget()
    if outcome is None:
        raise nothing_fits(problem, graph, chunks, microbatches)
    return make_partition(
        problem,
        _chunk_of(problem, prepared, outcome),
        [position.device for position in outcome.found.positions],
        microbatches=microbatches,
        lower_bound=outcome.bound / prepared.instance.scale,
        method=outcome.method,
        seconds=time.perf_counter() - started,
    )


def memory_matters(instance: Instance, route: Route) -> bool:
    """Some chunk could be too large for its memory (or must recompute in any case)."""
    if not instance.keeps:
        return True
    state, saved = int(instance.state.sum()), int(instance.saved.sum())
    held = max(position.held for position in route.positions)
    return any(state + held * saved > position.limit for position in route.positions)


def work_bound(instance: Instance, route: Route) -> int:
    """No bottleneck is below the work over the devices, or below the largest class."""
    total = int(instance.least.sum())
    spread = math.floor(total / route.nodes[0].left * (1 - 1e-12))
    return max(spread, int(instance.least.max()), 1)


def smallest(states: States, route: Route, bound: int, upper: int = NEVER - 1) -> tuple[Found | None, int]:
    """The best path of at most ``upper`` ticks, found under growing limits so that the windows stay small.

    Also returns the smallest bottleneck that is not excluded. Over all downsets the search is exact, and ends without
    an answer where the next limit would take too many steps.
    """
    possible = bound
    limits = [int(bound * factor) + 1 for factor in _GROWTH]
    for limit in [*(limit for limit in limits if limit * _STEP < upper), upper]:
        if states.complete and pairs_to_try(states, route, limit) > _MOST_PAIRS:
            return None, possible
        found = best_path(states, route, limit, widest=_NO_LIMIT if states.complete else _WIDEST)
        if found is not None:
            return found, possible
        possible = limit + 1
    return None, NEVER


def _search(prepared: Prepared, route: Route, slack: float) -> _Outcome | None:
    """The best cut that can be found for a route, or ``None`` if there is none at all."""
    bound = work_bound(prepared.instance, route)
    if prepared.chain is not None:
        found, possible = smallest(prepared.chain, route, bound)
        if found is not None:
            exact = _Outcome(prepared.chain, found, found.bottleneck, "exact slices of a chain")
            return _less_traffic(exact, route, slack)
        if possible == NEVER:
            return None
    best: _Outcome | None = None
    for name, states in prepared.orders:
        found, _ = smallest(states, route, bound, best.found.bottleneck if best else NEVER - 1)
        if found is not None and (best is None or found.bottleneck < best.found.bottleneck):
            best = _Outcome(states, found, bound, f"slices ({name})")
    lattice = prepared.lattice
    if lattice is not None:
        found, possible = smallest(lattice, route, bound, best.found.bottleneck if best else NEVER - 1)
        if found is not None:
            exact = _Outcome(lattice, found, found.bottleneck, f"exact over {len(lattice.work)} downsets")
            as_good = best is not None and best.found.bottleneck == found.bottleneck
            if best is not None and as_good and pairs_to_try(lattice, route, found.bottleneck) > _MANY_PAIRS:
                # Look for less traffic among the slices, which are far fewer.
                exact = dataclasses.replace(exact, states=best.states, found=best.found)
            return _less_traffic(exact, route, slack)
        assert best is None or possible < NEVER, "slices are paths over downsets"
        bound = max(bound, possible)
    if best is None:
        return None
    best = dataclasses.replace(best, bound=bound)
    if best.found.bottleneck > bound:
        best = _improved(prepared, route, best)
    return _less_traffic(best, route, slack)


def _improved(prepared: Prepared, route: Route, best: _Outcome) -> _Outcome:
    """The best cut near a known one."""
    cuts = [state_mask(best.states.members(state)) for state in best.found.path]
    orders = [states.order.tolist() for _, states in prepared.orders]
    states, found = improve(prepared.instance, route, best.found, cuts, orders)
    if (found.bottleneck, found.traffic) >= (best.found.bottleneck, best.found.traffic):
        return best
    return _Outcome(states, found, best.bound, f"{best.method}, improved")


def _less_traffic(outcome: _Outcome, route: Route, slack: float) -> _Outcome:
    """The same bottleneck, or one within the slack, with less traffic over the same states."""
    widest = _NO_LIMIT if outcome.states.complete else _WIDEST
    best = outcome.found
    for share in sorted({0.0, slack}):
        limit = int(outcome.found.bottleneck * (1 + share))
        found = best_path(outcome.states, route, limit, goal="traffic", widest=widest)
        # A worse bottleneck must be worth it: at least a twentieth of the traffic.
        if found is not None and found.traffic < best.traffic * (1 - (0.05 if share else 0.0)):
            best = found
    if len(set(route.stages)) < len(route.stages):
        # A stage runs the sum of its chunks: balance them, which the bottleneck alone does not ask for.
        found = best_path(outcome.states, route, best.bottleneck, goal="balance", widest=widest)
        if found is not None and _stage_load(found, route) < _stage_load(best, route):
            best = found
    return dataclasses.replace(outcome, found=best)


def _stage_load(found: Found, route: Route) -> float:
    """The largest sum of loads of the chunks of one stage."""
    return max(_stage_sums(route.stages, found.loads).values())


def _share_memory(
    problem: Problem, prepared: Prepared, outcome: _Outcome, chunks: int, microbatches: int, slack: float
) -> _Outcome | None:
    """Several chunks of a stage share its memory: if the free answer is too large, give each a part of it.

    By what the free answer would use, with the largest chunk of each stage as large as it would be, and in equal
    parts: the best answer is taken. Other parts are tried only if none of these fits.
    """
    assert problem.placement is not None
    stages = problem.placement
    trial = make_partition(
        problem,
        _chunk_of(problem, prepared, outcome),
        [position.device for position in outcome.found.positions],
        microbatches=microbatches,
        lower_bound=0.0,
        method=outcome.method,
    )
    if _stages_fit(problem, trial):
        return outcome
    room = {s: problem.devices[trial.devices[c]].memory - problem.reserved_bytes for c, s in enumerate(stages)}
    best: _Outcome | None = None
    for name in ("by need", "the largest chunk first", "equal parts", *(f"{tenth}/10 first" for tenth in _TENTHS)):
        if best is not None and name.endswith("/10 first"):
            break
        shares = [0.0] * chunks
        for stage, size in room.items():
            mine = [chunk for chunk in range(chunks) if stages[chunk] == stage]
            for chunk, share in zip(mine, _parts([trial.memory[chunk] for chunk in mine], size, name)):
                shares[chunk] = share
        shared = _search(prepared, make_route(problem, prepared.instance, chunks, microbatches, shares=shares), slack)
        if shared is not None and (best is None or shared.found.bottleneck < best.found.bottleneck):
            best = dataclasses.replace(shared, bound=outcome.bound, method=f"{shared.method}, memory {name}")
    return best


def _parts(sizes: Sequence[float], room: float, rule: str) -> list[float]:
    """The parts of a stage's memory for its chunks, which would like to have these sizes; they add up to one."""
    count, used, largest = len(sizes), math.fsum(sizes), max(sizes)
    if math.isinf(room) or rule == "equal parts" or count == 1:
        return [1.0 / count] * count
    if rule.endswith("/10 first"):
        part = int(rule[0]) / 10
        return [part, *[(1 - part) / (count - 1)] * (count - 1)]
    if used <= room:  # what is left is for all of them
        return [(size + (room - used) / count) / room for size in sizes]
    if rule == "by need" or largest >= room:
        return [size / used for size in sizes]
    rest = (room - largest) / (used - largest)
    first = sizes.index(largest)
    return [(size if index == first else size * rest) / room for index, size in enumerate(sizes)]


def _stages_fit(problem: Problem, answer: Partition) -> bool:
    assert problem.placement is not None
    held = _stage_sums(problem.placement, answer.memory)
    room = {s: problem.devices[answer.devices[c]].memory for c, s in enumerate(problem.placement)}
    return all(size <= room[stage] - problem.reserved_bytes for stage, size in held.items())


def _stage_sums(stages: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """Stage -> what its chunks have together."""
    sums: dict[int, float] = {}
    for stage, value in zip(stages, values):
        sums[stage] = sums.get(stage, 0) + value
    return sums


def _chunk_of(problem: Problem, prepared: Prepared, outcome: _Outcome) -> list[int]:
    """Op -> chunk, from the path of states: the number of cuts that the op is not before."""
    chunk_of = np.zeros(prepared.instance.classes, dtype=np.int64)
    for state in outcome.found.path[1:-1]:
        chunk_of += 1
        chunk_of[outcome.states.members(state)] -= 1
    of_class = classes(problem).class_of
    return [int(chunk_of[prepared.merged.class_of[of_class[op]]]) for op in range(problem.ops)]
