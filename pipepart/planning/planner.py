"""From a costed graph to a plan: cut it, schedule it, simulate it, bound it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipepart.cost import OpCosts
from pipepart.errors import PlanError, ScheduleError, did_you_mean
from pipepart.graph import OpGraph
from pipepart.partition import Link, Partition, Problem, baselines, partition
from pipepart.planning.plan import ChunkPlan, Plan, Traffic
from pipepart.schedule import SCHEDULES, ChunkCosts, Edges, make_schedule, simulate

__all__ = ["LOCAL_LINK", "Request", "auto_microbatches", "check_request", "make_plan"]

LOCAL_LINK = Link(bandwidth=1.5e9, latency=150e-6)
"""Point to point by gloo between processes of one host, as measured on two cores."""

TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "forward")
"""The schedules that the runtime can execute."""

ParameterSizes = Mapping[str, tuple[int, int]]
"""Parameter name -> (elements, bytes)."""

AUTO_SLACK = 1
"""One more micro-batch in flight than 1F1B needs absorbs jitter between stages."""


@dataclass(frozen=True)
class Request:
    """What the user asked for; the rest is decided here."""

    stages: int
    replicas: int = 1
    microbatches: int = 1
    schedule: str = "auto"
    chunks: int | str = "auto"
    slack: int | str = "auto"
    keep_together: tuple[tuple[str, ...], ...] = ()
    """Groups of module paths that stay in one chunk each."""
    split_at: tuple[str, ...] | None = None
    """Module paths before which a cut lies; as many as there are cuts."""
    link: Link = LOCAL_LINK


def check_request(schedule: str, microbatches: int | str = "auto", stages: int | str = "auto") -> None:
    """Refuse what can be refused before anything is started."""
    if schedule != "auto" and schedule not in TRAINING_SCHEDULES:
        if schedule in SCHEDULES:
            raise ScheduleError(
                f"schedule {schedule!r} cannot train here; use one of: {', '.join(TRAINING_SCHEDULES)}, auto"
            )
        raise ScheduleError(
            f"schedule {schedule!r} is not known: {did_you_mean(schedule, (*TRAINING_SCHEDULES, 'auto'))}"
        )
    for name, value in (("microbatches", microbatches), ("stages", stages)):
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanError(f"{name} must be a whole number of at least 1 or 'auto', got {value!r}")


def auto_microbatches(stages: int, batch_size: int) -> int:
    """Four micro-batches per stage keep the bubble of a balanced pipeline below a fifth; one stage needs no more than one."""
    return max(1, min(batch_size, 4 * stages)) if stages > 1 else 1


def make_plan(graph: OpGraph, costs: OpCosts, request: Request, microbatch_size: int, sizes: ParameterSizes) -> Plan:
    """The best plan for this graph and request: every schedule that is asked for is tried, the shortest step wins."""
    if costs.names != tuple(op.name for op in graph.ops):
        raise PlanError("the costs belong to another graph: their ops have other names. Measure the costs again.")
    plans = [
        _plan_for(graph, costs, request, microbatch_size, sizes, name, chunks, slack)
        for name, chunks, slack in _candidates(request)
    ]
    # Ties go to the least memory: the same step with fewer activations in flight.
    return min(plans, key=lambda plan: (round(plan.step_time, 9), max(plan.timeline.peak_activations, default=0.0)))


def _candidates(request: Request) -> list[tuple[str, int, int]]:
    """(schedule, chunks per stage, slack) to try."""
    names = ("1f1b", "gpipe") if request.schedule == "auto" else (request.schedule,)
    found = []
    for name in names:
        kind = SCHEDULES[name]
        chunks = (kind.fixed_chunks or kind.usual_chunks) if request.chunks == "auto" else int(request.chunks)
        if request.slack == "auto":
            slack = AUTO_SLACK if kind.takes_slack and request.stages > 1 else 0
        else:
            slack = int(request.slack)
        if request.schedule == "auto" and kind.fixed_chunks not in (None, chunks):
            continue
        found.append((name, chunks, slack))
    if not found:
        raise PlanError(
            f"no schedule takes chunks={request.chunks}; use schedule='interleaved', or leave chunks to 'auto'"
        )
    return found


def _plan_for(
    graph: OpGraph,
    costs: OpCosts,
    request: Request,
    microbatch_size: int,
    sizes: ParameterSizes,
    name: str,
    chunks: int,
    slack: int,
) -> Plan:
    total = request.stages * chunks
    schedule = make_schedule(name, stages=request.stages, microbatches=request.microbatches, chunks=chunks, slack=slack)
    problem = make_problem(graph, costs, request)
    found = partition(problem, total, microbatches=request.microbatches)
    others = {} if total == 1 else baselines(problem, total)

    def step(split: Partition) -> float:
        pieces, traffic = _chunks(graph, costs, sizes, split.chunk_of, schedule.placement, request.link)
        return simulate(schedule, *_simulated(pieces, traffic)).step_time

    # The search works with an estimate of the step; the simulation has the last word, also against the baselines.
    best = min([found, *others.values()], key=step) if total > 1 else found
    pieces, traffic = _chunks(graph, costs, sizes, best.chunk_of, schedule.placement, request.link)
    gap = max(0.0, best.bottleneck / found.lower_bound - 1.0) if found.lower_bound > 0 else 0.0
    return Plan(
        graph_hash=graph.hash,
        ops=tuple(op.name for op in graph.ops),
        chunk_of=best.chunk_of,
        placement=schedule.placement,
        replicas=request.replicas,
        microbatches=request.microbatches,
        microbatch_size=microbatch_size,
        schedule=name,
        slack=slack,
        chunks=pieces,
        traffic=traffic,
        bottleneck_gap=0.0 if best is found and found.proved else gap,
        lower_bound=_lower_bound(graph, costs, problem, request, chunks),
        cost_source=costs.source,
        method=best.method,
        baselines=tuple((other, step(split)) for other, split in sorted(others.items())),
    )


def make_problem(graph: OpGraph, costs: OpCosts, request: Request) -> Problem:
    """The partitioner's view of a graph: arrays, and which ops must stay together."""
    # Replicable ops (masks, positions) are copied where they are used, so their outputs never cross a cut.
    sent = [0 if op.replicable else size for op, size in zip(graph.ops, costs.output_bytes)]
    back = [size if op.requires_grad else 0 for op, size in zip(graph.ops, sent)]
    return Problem(
        forward=np.asarray(costs.forward),
        backward=np.asarray(costs.backward),
        parameter_bytes=np.asarray(costs.parameter_bytes, dtype=float),
        saved_bytes=np.asarray(costs.saved_bytes, dtype=float),
        output_bytes=np.asarray(sent, dtype=float),
        gradient_bytes=np.asarray(back, dtype=float),
        edges=graph.edges,
        colocated=(*graph.colocated, *_ends(graph), *_ops_of_modules(graph, request.keep_together)),
        split_at=_cuts(graph, request),
        links=(request.link,),
        overlap=True,
        names=costs.names,
    )


def _ends(graph: OpGraph) -> list[tuple[int, ...]]:
    """The batch enters with the first real op and the results leave with the loss: neither is a chunk of its own."""
    inputs = [i for i, op in enumerate(graph.ops) if op.kind == "input"]
    outputs = [i for i, op in enumerate(graph.ops) if op.kind == "output"]
    work = [i for i, op in enumerate(graph.ops) if op.kind in ("module", "function", "method") and not op.replicable]
    if not work:
        return []
    return [(*inputs, work[0]), (work[-1], *outputs)]


def _inside(op_module: str, path: str) -> bool:
    return op_module == path or op_module.startswith(path + ".")


def _ops_of_modules(graph: OpGraph, groups: Iterable[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    found = []
    for group in groups:
        ops = tuple(i for i, op in enumerate(graph.ops) if any(_inside(op.module, path) for path in group))
        if not ops:
            raise PlanError(f"keep_together: no op belongs to {list(group)}; {_known_modules(graph, group[0])}")
        found.append(ops)
    return tuple(found)


def _cuts(graph: OpGraph, request: Request) -> tuple[int, ...]:
    if request.split_at is None:
        return ()
    cuts = []
    for path in request.split_at:
        first = next((i for i, op in enumerate(graph.ops) if _inside(op.module, path)), None)
        if first is None:
            raise PlanError(f"split_at: no op belongs to {path!r}; {_known_modules(graph, path)}")
        cuts.append(first)
    return tuple(cuts)


def _known_modules(graph: OpGraph, near: str) -> str:
    return did_you_mean(near, {op.module for op in graph.ops if op.module})


def _chunks(
    graph: OpGraph,
    costs: OpCosts,
    sizes: ParameterSizes,
    chunk_of: Sequence[int],
    placement: Sequence[int],
    link: Link,
) -> tuple[tuple[ChunkPlan, ...], tuple[Traffic, ...]]:
    """What a partition means in figures: every chunk, and every pair of chunks that talk."""
    members: list[list[int]] = [[] for _ in placement]
    for op, chunk in enumerate(chunk_of):
        members[chunk].append(op)
    pieces = []
    for stage, ops in zip(placement, members):
        names = {name for op in ops for name in graph.ops[op].parameters}
        paths = [graph.ops[op].module for op in ops if graph.ops[op].module]
        pieces.append(
            ChunkPlan(
                stage=stage,
                ops=len(ops),
                first=paths[0] if paths else "-",
                last=paths[-1] if paths else "-",
                parameters=sum(sizes[name][0] for name in names),
                parameter_bytes=sum(sizes[name][1] for name in names),
                saved_bytes=int(sum(costs.saved_bytes[op] for op in ops)),
                forward=math.fsum(costs.forward[op] for op in ops),
                backward_input=math.fsum(costs.backward_input[op] for op in ops),
                backward_weight=math.fsum(costs.backward_weight[op] for op in ops),
            )
        )
    return tuple(pieces), _traffic(graph, costs, chunk_of, placement, link)


def _traffic(
    graph: OpGraph, costs: OpCosts, chunk_of: Sequence[int], placement: Sequence[int], link: Link
) -> tuple[Traffic, ...]:
    ahead: dict[tuple[int, int], int] = {}
    back: dict[tuple[int, int], int] = {}
    seen: set[tuple[int, int]] = set()
    for source, target in graph.edges:
        pair = (chunk_of[source], chunk_of[target])
        if pair[0] == pair[1] or (source, pair[1]) in seen or graph.ops[source].replicable:
            continue
        seen.add((source, pair[1]))
        ahead[pair] = ahead.get(pair, 0) + int(costs.output_bytes[source])
        if graph.ops[source].requires_grad:
            back[pair] = back.get(pair, 0) + int(costs.output_bytes[source])

    def seconds(pair: tuple[int, int], size: int) -> float:
        return 0.0 if placement[pair[0]] == placement[pair[1]] else link.seconds(size)

    return tuple(
        Traffic(*pair, size, back.get(pair, 0), seconds(pair, size), seconds(pair, back.get(pair, 0)))
        for pair, size in sorted(ahead.items())
    )


def _simulated(pieces: Sequence[ChunkPlan], traffic: Sequence[Traffic]) -> tuple[ChunkCosts, Edges]:
    pairs: Mapping[tuple[int, int], Traffic] = {(t.source, t.target): t for t in traffic}
    costs = ChunkCosts(
        forward=tuple(piece.forward for piece in pieces),
        backward_input=tuple(piece.backward_input for piece in pieces),
        backward_weight=tuple(piece.backward_weight for piece in pieces),
        send_forward={pair: t.forward_seconds for pair, t in pairs.items()},
        send_backward={pair: t.backward_seconds for pair, t in pairs.items() if t.backward_bytes},
    )
    return costs, Edges.of(len(pieces), pairs, [pair for pair, t in pairs.items() if t.backward_bytes])


def _lower_bound(graph: OpGraph, costs: OpCosts, problem: Problem, request: Request, chunks: int) -> float:
    """A step time that no split into this many stages can beat, whatever the schedule; communication counts as free.

    The slowest stage works m times. And the ops on the longest path of one micro-batch form a chain: if stage s holds
    t_s of it, it cannot start before the stages before it (P_s) and they cannot end before it, so P_s + m t_s <= step
    for all s, which adds up to path <= step (1 - (1 - 1/m)^p).
    """
    m, p = request.microbatches, request.stages
    longest: list[float] = []
    before: dict[int, list[int]] = {}
    for source, target in graph.edges:
        before.setdefault(target, []).append(source)
    for op, (forward, backward) in enumerate(zip(costs.forward, costs.backward)):
        longest.append(forward + backward + max((longest[source] for source in before.get(op, ())), default=0.0))
    path = max(longest, default=0.0)
    work = m * (sum(costs.forward) + sum(costs.backward)) / p
    if chunks > 1:  # a stage holds several chunks: neither the chain nor the largest chunk says more
        return max(work, path)
    slowest = partition(dataclasses.replace(problem, links=(Link(),)), p, microbatches=m).lower_bound
    return max(work, m * slowest, path / (1.0 - (1.0 - 1.0 / m) ** p))
