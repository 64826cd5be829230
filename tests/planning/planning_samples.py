"""Graphs and costs made up for tests of planning: no model, no tensors."""

from __future__ import annotations

import random
from collections.abc import Collection

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph
from pipepart.graph.opgraph import Op
from pipepart.planning import MicrobatchCount, Plan, PlanRequest, search
from pipepart.planning.memory import ParameterSize

__all__ = ["CostsBySize", "chain", "op", "planned", "random_graph", "sample_costs", "sizes_of"]


def op(name: str, kind: str = "module", module: str = "", size: int = 1000, **more: object) -> Op:
    fields: dict[str, object] = {
        "name": name,
        "kind": kind,
        "target": "linear",
        "module": module,
        "module_class": "Linear",
        "source": "model.py:1",
        "shape": (4, 8),
        "dtype": None,
        "output_bytes": size,
        "requires_grad": kind not in ("input", "output"),
        "parameters": (),
        "parameter_bytes": 0,
        "flops": 100,
        "random": False,
        "dynamic_shape": False,
        "replicable": False,
    }
    return Op(**{**fields, **more})  # type: ignore[arg-type]


def _with_ends(middle: list[Op], edges: list[tuple[int, int]], colocated: tuple[tuple[int, ...], ...] = ()) -> OpGraph:
    """Input first, output last; edges and groups name positions in ``middle``."""
    last = len(middle) + 1
    ops = (op("input", "input"), *middle, op("output", "output", size=0))
    targets = {b for _, b in edges}
    sources = {a for a, _ in edges}
    inner = [(a + 1, b + 1) for a, b in edges]
    inner += [(0, i + 1) for i in range(len(middle)) if i not in targets]
    inner += [(i + 1, last) for i in range(len(middle)) if i not in sources]
    groups = tuple(tuple(i + 1 for i in group) for group in colocated)
    return OpGraph(ops, tuple(sorted(set(inner))), groups, "0" * 64)


def chain(length: int, parameter_bytes: int = 4000) -> OpGraph:
    middle = [
        op(f"op{i}", module=f"layers.{i}", parameters=(f"layers.{i}.weight",), parameter_bytes=parameter_bytes)
        for i in range(length)
    ]
    return _with_ends(middle, [(i, i + 1) for i in range(length - 1)])


def random_graph(seed: int, length: int = 14) -> OpGraph:
    """A chain with skips, a branch here and there, ties, and some ops that stay together."""
    rng = random.Random(seed)
    middle = []
    for i in range(length):
        has = rng.random() < 0.6
        tied = has and i > 2 and rng.random() < 0.15
        name = "layers.0.weight" if tied else f"layers.{i}.weight"
        middle.append(
            op(
                f"op{i}",
                module=f"layers.{i}",
                size=rng.choice([0, 400, 4000, 40000]),
                parameters=(name,) if has else (),
                parameter_bytes=4000 if has else 0,
                requires_grad=rng.random() < 0.9,
                replicable=not has and rng.random() < 0.1,
            )
        )
    edges = {(i, i + 1) for i in range(length - 1)}
    for _ in range(length // 3):
        a, b = sorted(rng.sample(range(length), 2))
        edges.add((a, b))
    start = rng.randrange(length - 1)
    return _with_ends(middle, sorted(edges), ((start, start + 1),) if rng.random() < 0.5 else ())


def sample_costs(graph: OpGraph, seed: int = 0, saved: int = 10_000) -> OpCosts:
    """Milliseconds; backward takes about twice the forward."""
    rng = random.Random(seed)
    work = [op.kind not in ("input", "output", "number") for op in graph.ops]
    forward = [rng.uniform(0.5e-3, 3e-3) if busy else 0.0 for busy in work]
    return OpCosts(
        names=tuple(op.name for op in graph.ops),
        forward=tuple(forward),
        backward_input=tuple(t * rng.uniform(0.8, 1.2) for t in forward),
        backward_weight=tuple(t * rng.uniform(0.8, 1.2) if op.parameters else 0.0 for op, t in zip(graph.ops, forward)),
        parameter_bytes=tuple(op.parameter_bytes for op in graph.ops),
        saved_bytes=tuple(saved if busy else 0 for busy in work),
        output_bytes=tuple(op.output_bytes for op in graph.ops),
        source="sample",
    )


def sizes_of(graph: OpGraph, size: int = 4000) -> dict[str, ParameterSize]:
    return {name: ParameterSize(size // 4, size) for op in graph.ops for name in op.parameters}


class CostsBySize:
    """A source of costs: of each size of a micro-batch its own, or the same for all sizes, whatever the device."""

    def __init__(self, costs: OpCosts | dict[int, OpCosts]) -> None:
        self._costs = costs

    def at(self, microbatch_size: int, kind: str) -> OpCosts:
        return self._costs if isinstance(self._costs, OpCosts) else self._costs[microbatch_size]


def planned(
    graph: OpGraph,
    costs: OpCosts,
    size: int,
    sizes: dict[str, ParameterSize],
    *,
    stages: int,
    microbatches: int = 1,
    frozen: Collection[str] = (),
    **request: object,
) -> Plan:
    """The plan for one replica of a fixed mesh and one number of micro-batches."""
    count = MicrobatchCount(microbatches, size)
    asked = PlanRequest(microbatches * size, stages=stages, replicas=1, counts=(count,), **request)  # type: ignore[arg-type]
    return search(graph, CostsBySize(costs), sizes, asked, frozen=frozen)
