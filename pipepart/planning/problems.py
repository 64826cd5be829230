"""Problems for the partitioner: arrays of costs, devices, links, forced cuts, and ops that stay together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from pipepart.errors import PlanError, did_you_mean
from pipepart.graph import OpGraph
from pipepart.partition import Device, Link, Problem
from pipepart.planning.pricing import Pricing
from pipepart.planning.request import PlanRequest

__all__ = ["free_problem", "make_problem", "with_memory"]


def make_problem(
    pricing: Pricing, request: PlanRequest, microbatches: int, placement: Sequence[int] | None = None
) -> Problem:
    """Return the problem without memory limits; the load of a stage is the larger one of compute and communication."""
    graph, costs, layout = pricing.graph, pricing.costs[0], pricing.layout
    chunks = layout.stages if placement is None else len(placement)
    where = tuple(range(chunks)) if placement is None else tuple(placement)
    links = [
        layout.link(min(a, b), max(a, b)) if (a := where[cut]) != (b := where[cut + 1]) else Link()
        for cut in range(chunks - 1)
    ]
    same = len(set(links)) <= 1
    reduce = layout.reduce_seconds(0, 1e9) / 1e9 if layout.stages > 1 else 0.0
    return Problem(
        forward=np.asarray(costs.forward),
        backward=np.asarray(costs.backward),
        parameter_bytes=_first_uses(pricing),
        saved_bytes=np.asarray(costs.saved_bytes, dtype=float),
        output_bytes=pricing.outputs.sent,
        gradient_bytes=pricing.outputs.sent_back,
        edges=tuple(sorted(set(graph.edges))),
        colocated=(*graph.colocated, *_ends(graph), *_ops_of_modules(graph, request.keep_together)),
        split_at=_cuts(graph, request),
        links=(links[0] if links else Link(),) if same else tuple(links),
        devices=_devices(pricing),
        placement=None if where == tuple(range(chunks)) else where,
        overlap=True,
        state_factor=1.0 + pricing.weight_share + pricing.optimizer_factor,
        reduce_seconds=reduce / microbatches,
        names=costs.names,
    )


def with_memory(problem: Problem, pricing: Pricing, request: PlanRequest, in_flight: Sequence[int]) -> Problem:
    """Return the problem with the memory of every stage, and the micro-batches that each chunk holds at once."""
    limits = pricing.layout.memory
    if len(problem.devices) == 1 and len(set(limits)) > 1:
        devices = tuple(dataclasses.replace(problem.devices[0], memory=limit) for limit in limits)
    elif len(problem.devices) == 1:
        devices = (dataclasses.replace(problem.devices[0], memory=limits[0]),)
    else:
        devices = tuple(dataclasses.replace(d, memory=limit) for d, limit in zip(problem.devices, limits))
    recompute: tuple[str, ...] = ("none", "full")
    if request.recompute != "auto":
        recompute = ("full",) if request.recompute else ("none",)
    return dataclasses.replace(problem, devices=devices, in_flight=tuple(in_flight), recompute=recompute)


def free_problem(problem: Problem) -> Problem:
    """Return the problem without traffic, memory and reduction: its bound holds for every plan."""
    devices = tuple(dataclasses.replace(device, memory=math.inf) for device in problem.devices)
    return dataclasses.replace(
        problem, links=(Link(),), devices=devices, in_flight="none", recompute=("none",), reduce_seconds=0.0
    )


def _devices(pricing: Pricing) -> tuple[Device, ...]:
    if len(pricing.costs) == 1:
        return (Device(pricing.layout.kinds[0] if pricing.layout.kinds else "device"),)
    return tuple(
        Device(kind, forward=np.asarray(costs.forward), backward=np.asarray(costs.backward))
        for kind, costs in zip(pricing.layout.kinds, pricing.costs)
    )


def _first_uses(pricing: Pricing) -> np.ndarray:
    """Return the parameter bytes of each op; a parameter counts with the first op that uses it."""
    found = np.zeros(len(pricing.graph.ops))
    seen: set[str] = set()
    for index, op in enumerate(pricing.graph.ops):
        for name in op.parameters:
            if name not in seen:
                seen.add(name)
                found[index] += pricing.sizes[name].bytes
    return found


def _ends(graph: OpGraph) -> list[tuple[int, ...]]:
    """Return the groups of inputs with the first real op and of outputs with the last: neither is a chunk of its own."""
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


def _cuts(graph: OpGraph, request: PlanRequest) -> tuple[int, ...]:
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
