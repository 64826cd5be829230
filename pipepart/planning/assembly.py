"""From a split with its figures to the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipepart.planning.bounds import case_bound, least_slowest
from pipepart.planning.plan import Plan
from pipepart.planning.plan_parts import ChunkPlan
from pipepart.planning.priced import Priced
from pipepart.planning.pricing import Pricing
from pipepart.planning.splits import Case, Split
from pipepart.schedule import to_csv

__all__ = ["finish"]


def finish(case: Case, split: Split, tried: Sequence[tuple[str, float]] = ()) -> Plan:
    """The plan of a split."""
    pricing, shape, cluster = case.pricing, case.shape, case.request.cluster
    slowest, least = case.slowest(split), least_slowest(case, split.recipe.chunks)
    gap = max(0.0, slowest / least - 1.0) if least > 0 else 0.0
    limit = min(pricing.layout.memory)
    own = split.recipe.schedule.endswith(".csv")
    return Plan(
        graph_hash=pricing.graph.hash,
        ops=tuple(op.name for op in pricing.graph.ops),
        chunk_of=split.chunk_of,
        placement=split.schedule.placement,
        replicas=shape.replicas,
        microbatches=shape.microbatches,
        microbatch_size=shape.size,
        schedule=split.schedule.name if own else split.recipe.schedule,
        slack=split.recipe.slack,
        chunks=_chunk_plans(pricing, split.chunk_of, split.priced),
        traffic=split.priced.traffic,
        ties=split.priced.ties,
        bottleneck_gap=gap if gap > 1e-9 else 0.0,
        lower_bound=case_bound(case, split.recipe.chunks),
        cost_source=pricing.costs[0].source,
        method=split.method,
        baselines=tuple(sorted(split.others.items())),
        recompute=split.recompute if any(split.recompute) else (),
        memory=pricing.memory.of_stages(split.chunk_of, split.priced, split.schedule, split.recompute),
        memory_limit=limit if math.isfinite(limit) else None,
        cluster="" if cluster is None else cluster.name,
        tried=tuple(tried),
        actions=to_csv(split.schedule) if own else "",
    )


def _chunk_plans(pricing: Pricing, chunk_of: Sequence[int], priced: Priced) -> tuple[ChunkPlan, ...]:
    graph = pricing.graph
    members: list[list[int]] = [[] for _ in priced.placement]
    for op, chunk in enumerate(chunk_of):
        members[chunk].append(op)
    found = []
    for stage, price, ops in zip(priced.placement, priced.chunks, members):
        names = {name for op in ops for name in graph.ops[op].parameters}
        paths = [graph.ops[op].module for op in ops if graph.ops[op].module]
        found.append(
            ChunkPlan(
                stage=stage,
                ops=len(ops),
                first=paths[0] if paths else "-",
                last=paths[-1] if paths else "-",
                parameters=sum(pricing.sizes[name][0] for name in names),
                parameter_bytes=int(price.parameter_bytes),
                saved_bytes=int(price.saved_bytes),
                forward=price.forward,
                backward_input=price.backward_input,
                backward_weight=price.backward_weight,
                received_bytes=int(price.received_bytes),
                reduce=price.reduce,
                handling_forward=price.handling_forward,
                handling_backward=price.handling_backward,
            )
        )
    return tuple(found)
