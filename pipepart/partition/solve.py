"""The search for a partition: reductions, then an exact search where it can be afforded, and always a lower bound.

::

    problem -> units -> reduced costs -> slices of several orders  -> a first partition
                                      -> all downsets, if few      -> the best partition, proved
                                      -> else moves near the first -> a better partition, with its gap
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipepart.errors import PartitionError
from pipepart.partition.bottleneck import Found, States, best_path, pairs_to_try
from pipepart.partition.device_orders import DeviceOrders, device_orders
from pipepart.partition.downsets import as_mask
from pipepart.partition.improve import improve
from pipepart.partition.prepared import Prepared, all_costs, prepare
from pipepart.partition.problem import Problem
from pipepart.partition.result import Partition, make_partition
from pipepart.partition.shortage import nothing_fits
from pipepart.partition.unit_costs import NEVER, UnitCosts
from pipepart.partition.units import unit_graph

__all__ = ["partition"]

_GROWTH = (1.01, 1.03, 1.08, 1.2, 1.5, 2.0, 4.0)
"""Limits to try, relative to the bound: small limits make small ranges."""
_STEP = 1.1
"""A limit this near to the known bottleneck is left out: it saves too little."""
_WIDEST = 1500
"""States per range of a linear order; wider ranges are thinned."""
_NO_LIMIT = 1 << 40
_MOST_PAIRS = 40_000_000
"""Chunks that one exact search may look at, which takes a few seconds."""
_MANY_PAIRS = 8_000_000
_TENTHS = (3, 7, 2, 8, 4, 6, 1, 9)
"""Parts of a stage's memory for its first chunk, tried if nothing else fits."""


@dataclass(frozen=True, eq=False)
class _Outcome:
    states: States
    found: Found
    bound: int
    """Lower bound of the bottleneck, in ticks."""
    method: str


def partition(problem: Problem, chunks: int, *, microbatches: int = 1, slack: float = 1e-3) -> Partition:
    """Cut a model into chunks with the smallest bottleneck; of (nearly) equal partitions, the one with less traffic.

    ``slack`` is the relative amount by which the bottleneck may be worse if that lowers the traffic. The result depends
    on the arguments alone: all limits on the effort are counts, none is a time.
    """
    started = time.perf_counter()
    if chunks < 1 or microbatches < 1:
        raise PartitionError(f"partition: {chunks} chunks and {microbatches} micro-batches; expected at least 1 each")
    problem.fits_chunks(chunks)
    graph = unit_graph(problem)
    if not problem.fewer:
        graph.require(chunks, " (some ops must stay together)" if problem.colocated else "")
    linked = chunks if len(problem.links) > 1 else 0
    costs = all_costs(problem, linked, True)
    require_work = problem.fewer or int(costs.amounts.needed.sum()) >= chunks
    if not require_work:
        costs = all_costs(problem, linked, False)
    devices = device_orders(problem, costs.slowness, chunks, microbatches)
    memory_matters = _memory_matters(costs, devices)
    if not memory_matters:
        devices = devices.without_memory()
    prepared = prepare(problem, linked, require_work, memory_matters)
    outcome = _search(prepared, devices, slack)
    if outcome is not None and problem.placement is not None and memory_matters:
        outcome = _share_memory(problem, prepared, outcome, microbatches, slack)
    prepared.forget()
    if outcome is None:
        raise nothing_fits(problem, graph, chunks, microbatches)
    bound = outcome.bound / prepared.costs.scale
    found = _as_partition(problem, prepared, outcome, microbatches, bound)
    return dataclasses.replace(found, seconds=time.perf_counter() - started)


def _as_partition(
    problem: Problem, prepared: Prepared, outcome: _Outcome, microbatches: int, lower_bound: float
) -> Partition:
    """The partition of a path of states: the chunk of a unit is the number of cuts before it."""
    chunk_of = np.zeros(prepared.costs.units, dtype=np.int64)
    for state in outcome.found.path[1:-1]:
        chunk_of += 1
        chunk_of[outcome.states.members(state)] -= 1
    return make_partition(
        problem,
        [int(chunk_of[prepared.merged.unit_of[unit]]) for unit in unit_graph(problem).unit_of],
        [place.device for place in outcome.found.places],
        microbatches=microbatches,
        lower_bound=lower_bound,
        method=outcome.method,
    )


def _memory_matters(costs: UnitCosts, devices: DeviceOrders) -> bool:
    """Whether some chunk could be too large for its memory, or must recompute in any case."""
    state, saved = int(costs.amounts.state.sum()), int(costs.amounts.saved.sum())
    held = max(place.held for place in devices.places)
    return not costs.keeps or any(state + held * saved > place.limit for place in devices.places)


def _work_bound(costs: UnitCosts, devices: DeviceOrders) -> int:
    """Lower bound of the bottleneck: the work divided over the devices, or the largest unit."""
    total = int(costs.amounts.least.sum())
    spread = math.floor(total / devices.nodes[0].left * (1 - 1e-12))
    return max(spread, int(costs.amounts.least.max()), 1)


def _smallest(states: States, devices: DeviceOrders, bound: int, upper: int = NEVER - 1) -> tuple[Found | None, int]:
    """The best path of at most ``upper`` ticks, and the smallest bottleneck that is not excluded.

    Limits grow, so that the ranges stay small. Over all downsets the search is exact; it ends without a path if the
    next limit would take too many steps.
    """
    possible = bound
    limits = [int(bound * factor) + 1 for factor in _GROWTH]
    for limit in [*(limit for limit in limits if limit * _STEP < upper), upper]:
        if states.complete and pairs_to_try(states, devices, limit) > _MOST_PAIRS:
            return None, possible
        found = best_path(states, devices, limit, widest=_NO_LIMIT if states.complete else _WIDEST)
        if found is not None:
            return found, possible
        possible = limit + 1
    return None, NEVER


def _search(prepared: Prepared, devices: DeviceOrders, slack: float) -> _Outcome | None:
    """The best path that can be found, or ``None`` if there is none at all."""
    bound = _work_bound(prepared.costs, devices)
    if prepared.chain is not None:
        found, possible = _smallest(prepared.chain, devices, bound)
        if found is not None:
            exact = _Outcome(prepared.chain, found, found.bottleneck, "exact slices of a chain")
            return _less_traffic(exact, devices, slack)
        if possible == NEVER:
            return None
    best: _Outcome | None = None
    for name, states in prepared.orders:
        found, _ = _smallest(states, devices, bound, best.found.bottleneck if best else NEVER - 1)
        if found is not None and (best is None or found.bottleneck < best.found.bottleneck):
            best = _Outcome(states, found, bound, f"slices ({name})")
    downsets = prepared.downsets
    if downsets is not None:
        found, possible = _smallest(downsets, devices, bound, best.found.bottleneck if best else NEVER - 1)
        if found is not None:
            exact = _Outcome(downsets, found, found.bottleneck, f"exact over {len(downsets.work)} downsets")
            as_good = best is not None and best.found.bottleneck == found.bottleneck
            if best is not None and as_good and pairs_to_try(downsets, devices, found.bottleneck) > _MANY_PAIRS:
                # Look for less traffic among the slices, which are far fewer.
                exact = dataclasses.replace(exact, states=best.states, found=best.found)
            return _less_traffic(exact, devices, slack)
        assert best is None or possible < NEVER, "slices are paths over downsets"
        bound = max(bound, possible)
    if best is None:
        return None
    best = dataclasses.replace(best, bound=bound)
    if best.found.bottleneck > bound:
        best = _improved(prepared, devices, best)
    return _less_traffic(best, devices, slack)


def _improved(prepared: Prepared, devices: DeviceOrders, best: _Outcome) -> _Outcome:
    """The best path near a known one."""
    cuts = [as_mask(best.states.members(state)) for state in best.found.path]
    orders = [states.order.tolist() for _, states in prepared.orders]
    states, found = improve(prepared.costs, devices, best.found, cuts, orders)
    if (found.bottleneck, found.traffic) >= (best.found.bottleneck, best.found.traffic):
        return best
    return _Outcome(states, found, best.bound, f"{best.method}, improved")


def _less_traffic(outcome: _Outcome, devices: DeviceOrders, slack: float) -> _Outcome:
    """A path with the same bottleneck, or one within the slack, and less traffic over the same states."""

    def stage_load(found: Found) -> float:
        return max(_stage_sums(devices.stages, found.loads).values())

    widest = _NO_LIMIT if outcome.states.complete else _WIDEST
    best = outcome.found
    for share in sorted({0.0, slack}):
        limit = int(outcome.found.bottleneck * (1 + share))
        found = best_path(outcome.states, devices, limit, goal="traffic", widest=widest)
        # A worse bottleneck must be worth it: at least a twentieth of the traffic.
        if found is not None and found.traffic < best.traffic * (1 - (0.05 if share else 0.0)):
            best = found
    if len(set(devices.stages)) < len(devices.stages):
        # A stage runs all of its chunks. The bottleneck alone does not balance their sum.
        found = best_path(outcome.states, devices, best.bottleneck, goal="balance", widest=widest)
        if found is not None and stage_load(found) < stage_load(best):
            best = found
    return dataclasses.replace(outcome, found=best)


def _share_memory(
    problem: Problem, prepared: Prepared, outcome: _Outcome, microbatches: int, slack: float
) -> _Outcome | None:
    """The best path if the chunks of a stage share its memory: the known one if it fits, else each gets a part.

    Parts follow the need of each chunk in the known path, or keep the largest chunk of each stage as it is, or are
    equal; the best path is taken. Other parts are tried only if none of these fits.
    """
    assert problem.placement is not None
    stages, chunks = problem.placement, len(problem.placement)
    trial = _as_partition(problem, prepared, outcome, microbatches, 0.0)
    room = {stage: problem.room(device) for stage, device in zip(stages, trial.devices)}
    if all(size <= room[stage] for stage, size in _stage_sums(stages, trial.memory).items()):
        return outcome
    best: _Outcome | None = None
    for name in ("by need", "the largest chunk first", "equal parts", *(f"{tenth}/10 first" for tenth in _TENTHS)):
        if best is not None and name.endswith("/10 first"):
            break
        shares = [0.0] * chunks
        for stage, size in room.items():
            mine = [chunk for chunk in range(chunks) if stages[chunk] == stage]
            for chunk, share in zip(mine, _parts([trial.memory[chunk] for chunk in mine], size, name)):
                shares[chunk] = share
        devices = device_orders(problem, prepared.costs.slowness, chunks, microbatches, shares=shares)
        shared = _search(prepared, devices, slack)
        if shared is not None and (best is None or shared.found.bottleneck < best.found.bottleneck):
            best = dataclasses.replace(shared, bound=outcome.bound, method=f"{shared.method}, memory {name}")
    return best


def _parts(sizes: Sequence[float], room: float, rule: str) -> list[float]:
    """Parts of a stage's memory for chunks that need these sizes; the parts add up to one."""
    count, used, largest = len(sizes), math.fsum(sizes), max(sizes)
    if math.isinf(room) or rule == "equal parts" or count == 1:
        return [1.0 / count] * count
    if rule.endswith("/10 first"):
        part = int(rule[0]) / 10
        return [part, *[(1 - part) / (count - 1)] * (count - 1)]
    if used <= room:  # all chunks share the rest
        return [(size + (room - used) / count) / room for size in sizes]
    if rule == "by need" or largest >= room:
        return [size / used for size in sizes]
    rest = (room - largest) / (used - largest)
    first = sizes.index(largest)
    return [(size if index == first else size * rest) / room for index, size in enumerate(sizes)]


def _stage_sums(stages: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """Sums over the chunks of each stage."""
    sums: dict[int, float] = {}
    for stage, value in zip(stages, values):
        sums[stage] = sums.get(stage, 0) + value
    return sums
