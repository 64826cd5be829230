"""The outcome of a search: the plan of the best split, or the error if no split fits into memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pipepart.errors import PlanError
from pipepart.graph import Op
from pipepart.planning.chunks import ChunkPlan
from pipepart.planning.describe import describe_memory, format_bytes
from pipepart.planning.layout import Layout
from pipepart.planning.plan import Plan
from pipepart.planning.request import ScheduleChoice
from pipepart.planning.splits import Case, Split
from pipepart.schedule import to_csv

__all__ = ["make_plan", "nothing_fits"]

_NO_PLACE = ("input", "number", "output")
"""Kinds of ops that belong to no module."""


def make_plan(case: Case, split: Split, tried: Sequence[tuple[str, float]] = ()) -> Plan:
    """Make the plan of a split."""
    pricing, shape, cluster = case.pricing, case.shape, case.request.cluster
    choice, schedule, priced, recompute = split.choice, split.schedule, split.priced, split.fit.recompute
    limit = min(pricing.layout.memory)
    own = choice.schedule.endswith(".csv")
    return Plan(
        graph_hash=pricing.graph.hash,
        ops=tuple(op.name for op in pricing.graph.ops),
        chunk_of=split.chunk_of,
        placement=schedule.placement,
        replicas=shape.replicas,
        microbatches=shape.microbatches,
        microbatch_size=shape.size,
        schedule=schedule.name if own else choice.schedule,
        slack=choice.slack,
        chunks=_named_chunks(case, split),
        traffic=priced.traffic,
        ties=priced.ties,
        bottleneck_gap=_bottleneck_gap(case, split),
        lower_bound=case.step_bound(choice.chunks),
        cost_source=pricing.costs[0].source,
        method=split.method,
        baselines=tuple(sorted(split.others.items())),
        recompute=recompute if any(recompute) else (),
        memory=pricing.memory.of_stages(split.chunk_of, priced, schedule, recompute),
        memory_limit=limit if math.isfinite(limit) else None,
        cluster="" if cluster is None else cluster.name,
        tried=tuple(tried),
        actions=to_csv(schedule) if own else "",
        memory_source=case.request.limit_source(pricing.layout),
        links=pricing.layout.links.named if pricing.layout.links is not None else (),
        modules=tuple("" if op.replicable or op.kind in _NO_PLACE else op.module for op in pricing.graph.ops),
    )


def _bottleneck_gap(case: Case, split: Split) -> float:
    """Return an upper bound of the distance of the slowest stage from the optimum, as a fraction."""
    least = case.least_slowest(split.choice.chunks)
    work = [0.0] * case.shape.stages
    for chunk in split.priced.chunks:
        work[chunk.stage] += chunk.compute
    gap = max(work) / least - 1.0 if least > 0 else 0.0
    return gap if gap > 1e-9 else 0.0


def _named_chunks(case: Case, split: Split) -> tuple[ChunkPlan, ...]:
    """Return the chunks with their module paths and numbers of parameters."""
    members: list[list[Op]] = [[] for _ in split.priced.placement]
    for op, home in zip(case.pricing.graph.ops, split.chunk_of):
        members[home].append(op)
    found = []
    for chunk, ops in zip(split.priced.chunks, members):
        names = {name for op in ops for name in op.parameters}
        paths = [op.module for op in ops if op.module] or ["-"]
        elements = sum(case.pricing.sizes[name].elements for name in names)
        found.append(dataclasses.replace(chunk, first=paths[0], last=paths[-1], parameters=elements))
    return tuple(found)


def nothing_fits(case: Case, best: Split) -> PlanError:
    """Make the error for a mesh on which no split fits; ``best`` is the one that exceeds the limit least."""
    layout, worst = case.pricing.layout, best.fit.worst
    memory = case.pricing.memory.of_stages(best.chunk_of, best.priced, best.schedule, best.fit.recompute)[worst]
    where = f"stage {worst} of {case.shape.stages}"
    if layout.kinds:
        where += f" on {layout.kinds[worst]!r}"
    options = _what_would_fit(case, best.choice)
    advice = (
        f"Any of these would fit: {', or '.join(options)}."
        if options
        else "Neither recompute, nor micro-batches of a sixteenth, nor eight times the stages would fit alone: combine "
        "them, or use devices with more memory."
    )
    return PlanError(
        f"no split fits into memory: at best, {where} needs {format_bytes(memory.total)} ({describe_memory(memory)}), "
        f"{format_bytes(best.fit.over)} more than its {format_bytes(layout.memory[worst])} (schedule "
        f"{best.choice.schedule}, {case.shape.microbatches} micro-batches{_limit(case)}). {advice}"
    )


def _limit(case: Case) -> str:
    source = case.request.limit_source(case.pricing.layout)
    return f"; limit by {source}" if source else ""


def _what_would_fit(case: Case, choice: ScheduleChoice) -> list[str]:
    """Return the single changes that make the model fit: recompute, smaller micro-batches, more stages. Each is tried."""
    pricing, request, shape, layout = case.pricing, case.request, case.shape, case.pricing.layout
    options = []
    if request.recompute is False:
        again = Case(pricing, dataclasses.replace(request, recompute="auto"), shape)
        if again.fits(choice):
            options.append("recompute='auto'")
    for part in (2, 4, 8, 16):
        smaller = dataclasses.replace(pricing, costs=tuple(one.scaled(1 / part) for one in pricing.costs))
        more = dataclasses.replace(shape, microbatches=shape.microbatches * part)
        if Case(smaller, request, more).fits(choice):
            options.append(f"microbatches={more.microbatches} (micro-batches of 1/{part} of the size)")
            break
    if len(pricing.costs) == 1 and request.split_at is None:
        p = shape.stages
        link = layout.link(0, 1) if p > 1 else layout.within
        for stages in sorted({p + 1, p + p // 2, 2 * p, 4 * p, 8 * p} - {p}):
            wider = Layout.uniform(
                stages, layout.replicas, memory=min(layout.memory), link=link, handling=layout.handling
            )
            on_more = Case(
                dataclasses.replace(pricing, layout=wider), request, dataclasses.replace(shape, stages=stages)
            )
            if on_more.fits(choice):
                options.append(f"stages={stages}")
                break
    return options
