"""The price of each mode of `sync` for a plan: seconds of a step, seconds of exchanges between replicas, memory of a rank.

An exchange of gradients runs beside the backward, as the simulator places it; an exchange of parameters follows the update, and
nothing hides it. With `fsdp` the parameters for a run of actions of one chunk (a visit) come beside the run before it. `n`
replicas send `S` bytes over a link of latency `l` and bandwidth `b`:

```
mean     ring of all-reduces                2 (n-1) (l + S/nb)   beside the backward
sharded  to the owners, and back from them    (n-1) (l + S/nb)   beside the backward, and once more after the update
nested   inside a host, between hosts and back: log2(k) (l + S/b), a ring of the hosts, log2(k) (l + S/b)
fsdp     to the owners, and back from them    (n-1) (l + S/nb)   beside the backward, and once more before visits to chunks
master   to the first one, and back         2 (n-1) (l + S/nb)   beside the backward, and log2(n) (l + S/b) after it
local    ring of all-reduces                2 (n-1) (l + S/nb)   after each round
ring     to the neighbour                          l + S/b       beside the steps, unless a step is shorter
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipepart.partition import Link
from pipepart.planning.describe import format_bytes, format_seconds
from pipepart.planning.layout import Layout
from pipepart.planning.plan import Plan
from pipepart.planning.sync_memory import bytes_at_work
from pipepart.planning.sync_mode import SyncMode
from pipepart.schedule import Action, simulate, visits_of

__all__ = ["FSDP_BY_VISIT", "SyncPrice", "describe_sync", "sync_prices"]

FSDP_BY_VISIT = "fsdp, gather microbatch"
"""The price of `fsdp` whose parameters come for each run of actions of one chunk."""


@dataclass(frozen=True)
class SyncPrice:
    """The price of one mode."""

    name: str
    step: float
    """Seconds of a step with what follows its update, averaged over a round."""
    exchange: float
    """Seconds of the exchanges of a step on the stage with the longest, hidden or not."""
    memory: float
    """Bytes of the fullest stage on the replica that holds most."""
    same: bool
    """Whether the mode gives the result of ``mean``."""


def sync_prices(plan: Plan, layout: Layout, optimizer_factor: float = 2.0) -> tuple[SyncPrice, ...]:
    """Return the price of each mode for the replicas of a plan; none with one replica.

    `optimizer_factor`: bytes of optimizer state per byte of trained parameters.
    """
    count = plan.replicas
    if count < 2 or not plan.memory:
        return ()
    trained = [float(memory.gradients) for memory in plan.memory]
    links = [layout.between_replicas(stage) for stage in range(plan.stages)]
    weights = [float(max(memory.weights, memory.gradients)) for memory in plan.memory]
    rest = [m.total - m.optimizer - m.weights + held for m, held in zip(plan.memory, weights)]
    plain = _step(plan, lambda stage, size: 0.0)

    def all_of(seconds: Callable[[Link, float], float]) -> float:
        return max(seconds(link, size) for link, size in zip(links, trained))

    def half(link: Link, size: float) -> float:
        return (count - 1) * (link.latency + size / count / link.bandwidth) if size else 0.0

    def ring(link: Link, size: float) -> float:
        return 2 * half(link, size)

    def tree(link: Link, size: float) -> float:
        return math.ceil(math.log2(count)) * (link.latency + size / link.bandwidth) if size else 0.0

    def hop(link: Link, size: float) -> float:
        return link.latency + size / link.bandwidth if size else 0.0

    def memory(share: float, copies: float = 0.0) -> float:
        states = (size * (optimizer_factor * share + copies) for size in trained)
        return max(fixed + own for fixed, own in zip(rest, states))

    def borrowing(once: bool) -> SyncPrice:
        """Parameters come once per step, or for each visit to a chunk."""
        waits, moved, held = [], [], []
        for stage, (link, own) in enumerate(zip(links, weights)):
            shown, total = _gathered(plan, stage, once, lambda size, link=link: half(link, size))  # type: ignore[misc]
            waits.append(shown)
            moved.append(total + half(link, trained[stage]))
            chunks = [float(chunk.parameter_bytes) for chunk in plan.chunks if chunk.stage == stage]
            kept = own if once else bytes_at_work(own, chunks, 1.0 / count)
            held.append(rest[stage] - own + kept + trained[stage] * optimizer_factor / count)
        return SyncPrice("fsdp" if once else FSDP_BY_VISIT, beside(half) + max(waits), max(moved), max(held), True)

    def beside(seconds: Callable[[Link, float], float]) -> float:
        return _step(plan, lambda stage, size: seconds(links[stage], size))

    def levels(stage: int, size: float) -> float:
        found = layout.levels(stage)
        if found is None or not size:
            return 0.0
        inner, inside, between = found
        hosts = count // inner
        up = math.ceil(math.log2(inner)) * (inside.latency + size / inside.bandwidth)
        return 2 * up + 2 * (hosts - 1) * (between.latency + size / hosts / between.bandwidth)

    nested = []
    sizes = {found[0] for found in map(layout.levels, range(plan.stages)) if found is not None}
    if len(sizes) == 1 and all(layout.levels(stage) is not None for stage in range(plan.stages)):
        exchange = max(levels(stage, size) for stage, size in enumerate(trained))
        nested.append(SyncPrice(f"mean, inside {sizes.pop()}", _step(plan, levels), exchange, memory(1.0), True))
    every = SyncMode(mode="local").every
    return (
        SyncPrice("mean", beside(ring), all_of(ring), memory(1.0), True),
        *nested,
        SyncPrice("sharded", beside(half) + all_of(half), all_of(ring), memory(1.0 / count), True),
        borrowing(once=True),
        *([borrowing(once=False)] if plan.chunks_per_stage > 1 else []),
        SyncPrice("master", beside(ring) + all_of(tree), all_of(ring) + all_of(tree), memory(1.0), True),
        SyncPrice(f"local, every {every}", plain + all_of(ring) / every, all_of(ring) / every, memory(1.0), False),
        SyncPrice(
            f"diloco, every {every}", plain + all_of(ring) / every, all_of(ring) / every, memory(1.0, 2.0), False
        ),
        SyncPrice("ring", max(plain, all_of(hop)), all_of(hop), memory(1.0, 3.0), False),
    )


def _step(plan: Plan, reduce: Callable[[int, float], float]) -> float:
    """Return the simulated seconds of a step whose chunks exchange gradients for so many seconds."""
    seconds = []
    for chunk in plan.chunks:
        held = plan.memory[chunk.stage]
        trained = chunk.parameter_bytes * (min(1.0, held.gradients / held.weights) if held.weights else 0.0)
        seconds.append(reduce(chunk.stage, trained))
    costs = replace(plan.costs, reduce=tuple(seconds))
    return simulate(plan.make_schedule(), costs, plan.edges).step_time


def _gathered(plan: Plan, stage: int, once: bool, seconds: Callable[[float], float]) -> tuple[float, float]:
    """Return the seconds of a step in which a stage waits for parameters of other replicas, and those of all transfers."""
    actions = plan.make_schedule().actions[stage]
    names = {index: (str(index),) for index, chunk in enumerate(plan.chunks) if chunk.stage == stage}
    waits = total = beside = 0.0
    for visit in visits_of([action.chunk for action in actions], names, once):
        transfer = seconds(sum(float(plan.chunks[int(name)].parameter_bytes) for name in visit.borrowed))
        waits, total = waits + max(0.0, transfer - beside), total + transfer
        beside = sum(_seconds(plan, action) for action in actions[visit.first : visit.last + 1])
    return waits, total


def _seconds(plan: Plan, action: Action) -> float:
    """Return the seconds of a compute action."""
    chunk = plan.chunks[action.chunk]
    times = {"F": chunk.forward, "B": chunk.backward, "I": chunk.backward_input, "W": chunk.backward_weight}
    return times.get(action.kind, 0.0)


def describe_sync(prices: Sequence[SyncPrice], limit: float | None = None) -> str:
    """Return a table of prices for the terminal; empty without prices."""
    if not prices:
        return ""
    base = prices[0].step
    rows = [("sync", "step", "of mean", "exchanges", "memory", "result")]
    for price in prices:
        full = limit is not None and price.memory > limit
        rows.append(
            (
                price.name,
                format_seconds(price.step),
                f"{price.step / base:.2f}" if base else "-",
                format_seconds(price.exchange),
                format_bytes(price.memory) + (" (too much)" if full else ""),
                "that of mean" if price.same else "another",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
