"""Plans, graphs and timelines for the tests of reports, made without a model."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

from pipepart.cost import OpCosts
from pipepart.planning import ChunkPlan, Plan, Traffic
from pipepart.schedule import SCHEDULES, Action, Event, Timeline, make_schedule, simulate

__all__ = ["costs_of", "gpt_graph", "jittered", "moved", "sample_plan"]


def sample_plan(
    stages: int = 4,
    chunks: int = 1,
    microbatches: int = 8,
    schedule: str = "1f1b",
    *,
    graph: Any = None,
    seed: int = 0,
    skips: bool = True,
) -> Plan:
    """A plan with random costs that cuts program order into equal parts."""
    draw = random.Random(seed)
    slack = 1 if SCHEDULES[schedule].takes_slack else 0
    made = make_schedule(schedule, stages=stages, microbatches=microbatches, chunks=chunks, slack=slack)
    total = stages * chunks
    names = tuple(op.name for op in graph.ops) if graph is not None else tuple(f"op_{n}" for n in range(10 * total))
    chunk_of = tuple(n * total // len(names) for n in range(len(names)))
    pieces = tuple(
        ChunkPlan(
            stage=made.placement[c],
            ops=chunk_of.count(c),
            first=f"blocks.{c}.norm",
            last=f"blocks.{c}.mlp.out",
            parameters=1_200_000,
            parameter_bytes=4_800_000,
            saved_bytes=2_500_000 + 1000 * c,
            forward=draw.uniform(0.004, 0.006),
            backward_input=draw.uniform(0.004, 0.006),
            backward_weight=draw.uniform(0.003, 0.005),
        )
        for c in range(total)
    )
    pairs = [(c, c + 1) for c in range(total - 1)] + ([(0, 2)] if skips and total > 2 else [])
    traffic = tuple(Traffic(a, b, 800_000, 800_000, 7e-4, 7e-4) for a, b in sorted(pairs))
    return Plan(
        graph_hash=graph.hash if graph is not None else "0123abcd",
        ops=names,
        chunk_of=chunk_of,
        placement=made.placement,
        replicas=1,
        microbatches=microbatches,
        microbatch_size=4,
        schedule=schedule,
        slack=slack,
        chunks=pieces,
        traffic=traffic,
        bottleneck_gap=0.0,
        lower_bound=0.1,
        cost_source="profile",
        method="exact",
        baselines=(("even", 0.2),),
    )


def jittered(plan: Plan, seed: int = 1) -> Timeline:
    """A step as it is measured: every action takes its time, or up to a quarter more.

    A send lasts as long as handing over takes, a receive as long as its stage waits for it.
    """
    draw = random.Random(seed)
    exact = simulate(plan.make_schedule(), plan.costs, plan.edges, scale=lambda action: draw.uniform(1.0, 1.25))
    events = [event for event in exact.events if event.action.kind in "FBIW"]
    arrivals: dict[tuple[str, int, int], list[Event]] = {}
    for event in exact.events:
        if event.action.kind == "SEND":
            action = event.action
            arrivals.setdefault((action.payload, action.peer, action.microbatch), []).append(event)
            events.append(Event(event.stage, action, event.start, event.start + event.duration / 10))
    for stage, mine in enumerate(exact.compute):
        free = 0.0
        for event in mine:
            kind, chunk, k = (
                ("B" if event.action.kind == "I" else event.action.kind),
                event.action.chunk,
                event.action.microbatch,
            )
            for sent in sorted(arrivals.get((kind, chunk, k), ()), key=lambda e: e.end):
                receive = Action("RECV", chunk, k, sent.action.chunk, kind)
                events.append(Event(stage, receive, free, max(free, sent.end)))
                free = events[-1].end
            free = event.end
    return Timeline.from_events(plan.stages, events)


def gpt_graph(layers: int = 4, odd_name: str | None = None) -> Any:
    """A graph like that of a GPT: blocks with residuals, a mask that all blocks use, a head tied to the embedding."""
    ops: list[Any] = []
    edges: list[tuple[int, int]] = []

    def op(name: str, module: str, cls: str, target: str, needs: list[int], weight: str = "", size: int = 0) -> int:
        ops.append(
            SimpleNamespace(
                name=name,
                kind="module" if cls else "function",
                target=target,
                module=module,
                module_class=cls,
                source=f"model.py:{10 + len(ops) % 90}",
                shape=(4, 128, 256),
                dtype="float32",
                output_bytes=524_288,
                requires_grad=True,
                parameters=(weight,) if weight else (),
                parameter_bytes=size,
                flops=1e6 * (len(ops) % 7),
                replicable=False,
            )
        )
        edges.extend((need, len(ops) - 1) for need in needs)
        return len(ops) - 1

    def layer(name: str, path: str, cls: str, needs: list[int], size: int = 0) -> int:
        return op(name, path, cls, path, needs, f"{path}.weight" if size else "", size)

    tokens = op("x", "", "", "x", [])
    embedded = layer("wte", "transformer.wte", "Embedding", [tokens], 5_000_000)
    places = layer("wpe", "transformer.wpe", "Embedding", [tokens], 100_000)
    hidden = op("add", "transformer", "", "add", [embedded, places])
    mask = op("tril", "transformer", "", "tril", [])
    for n in range(layers):
        block = f"transformer.h.{odd_name if odd_name is not None and n == 1 else n}"
        normed = layer(f"ln_1_{n}", f"{block}.ln_1", "LayerNorm", [hidden], 1024)
        qkv = layer(f"qkv_{n}", f"{block}.attn.qkv", "Linear", [normed], 786_432)
        parts = [op(f"split_{n}_{part}", f"{block}.attn", "", "getitem", [qkv]) for part in range(3)]
        mixed = op(f"sdpa_{n}", f"{block}.attn", "", "scaled_dot_product_attention", [*parts, mask])
        out = layer(f"out_{n}", f"{block}.attn.out", "Linear", [mixed], 262_144)
        middle = op(f"add_{n}_a", block, "", "add", [hidden, out])
        normed = layer(f"ln_2_{n}", f"{block}.ln_2", "LayerNorm", [middle], 1024)
        wide = layer(f"fc_{n}", f"{block}.mlp.fc", "Linear", [normed], 1_048_576)
        bent = layer(f"gelu_{n}", f"{block}.mlp.act", "GELU", [wide])
        narrow = layer(f"proj_{n}", f"{block}.mlp.proj", "Linear", [bent], 1_048_576)
        hidden = op(f"add_{n}_b", block, "", "add", [middle, narrow])
    normed = layer("ln_f", "transformer.ln_f", "LayerNorm", [hidden], 1024)
    logits = op("lm_head", "lm_head", "Linear", "lm_head", [normed], "transformer.wte.weight", 5_000_000)
    op("cross_entropy", "", "", "cross_entropy", [logits, tokens])
    return SimpleNamespace(ops=tuple(ops), edges=tuple(edges), colocated=(), hash="feedc0de")


def costs_of(graph: Any, seed: int = 0) -> OpCosts:
    draw = random.Random(seed)
    times = tuple(draw.uniform(1e-5, 3e-4) * (3.0 if op.module_class == "Linear" else 0.3) for op in graph.ops)
    sizes = tuple(op.output_bytes for op in graph.ops)
    weights = tuple(op.parameter_bytes for op in graph.ops)
    return OpCosts(tuple(op.name for op in graph.ops), times, times, times, weights, sizes, sizes, "profile")


def moved(plan: Plan, ops: int) -> Plan:
    """The same plan with every cut so many ops earlier."""
    last = len(plan.chunks) - 1
    return dataclasses.replace(plan, chunk_of=(*plan.chunk_of[ops:], *(last,) * ops))
