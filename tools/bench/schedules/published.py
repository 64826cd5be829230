"""Bubble rates and throughput of a paper, from its own times by our generators, searches and simulator.

The bubble rate of the paper is the share of the largest span of a stage (`Timeline.period`) that is no compute. Its
interleaved 1F1B lets only the first micro-batch of each group wait for the link from the last stage to the first one
(and back), so that it comes out p links shorter than when all of them wait: `span_by_the_paper` counts like that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipepart.schedule import ChunkCosts, Schedule, make_schedule, simulate
from pipepart.schedule.searched import search_order

__all__ = ["Row", "bubble_rates", "published", "rows", "span_by_the_paper", "spans", "throughputs"]

_EXACT = {"1f1b": "1f1b", "zb_h1": "zb_h1", "zb_h2": "zb_h2"}


@dataclass(frozen=True)
class Row:
    """One model, number of stages and number of micro-batches of the paper."""

    model: str
    layers: int
    heads: int
    hidden: int
    seq: int
    p: int
    b: int
    """Samples of a micro-batch."""
    m: int
    T_F: float
    """Milliseconds of a stage for one micro-batch; so are `T_B`, `T_W` and `T_comm`."""
    T_B: float
    T_W: float
    T_comm: float
    bubble: Mapping[str, float]
    samples_per_gpu_s: Mapping[str, float]

    @property
    def chunks(self) -> int:
        """Chunks per stage of interleaved 1F1B: one layer each. The ends of the pipeline have a layer less."""
        return (self.layers + 2) // self.p

    @property
    def work(self) -> float:
        """Milliseconds of compute of a stage."""
        return self.m * (self.T_F + self.T_B + self.T_W)

    def costs(self, chunks: int = 1, *, waiting: bool = False) -> ChunkCosts:
        """Return equal stages. With ``waiting``, stages compute nothing while a message leaves, as Megatron's did."""
        even = ChunkCosts.even(
            self.p, chunks, forward=self.T_F, backward_input=self.T_B, backward_weight=self.T_W, send=self.T_comm
        )
        held = (self.T_comm if waiting else 0.0,) * even.chunks
        # The paper's memory model: a micro-batch keeps 34 + 5 a s / h bytes per value, and 32 of them until its W.
        kept = 32 / (34 + 5 * self.heads * self.seq / self.hidden)
        return ChunkCosts(
            even.forward,
            even.backward_input,
            even.backward_weight,
            kept_for_weight=kept,
            send_forward=even.send_forward,
            send_backward=even.send_backward,
            handling_forward=held,
            handling_backward=held,
        )


def rows() -> tuple[Row, ...]:
    """Return the rows of the paper's tables 3 to 6."""
    file = json.loads((Path(__file__).parent / "published.json").read_text())
    return tuple(Row(**row) for row in file["rows"])


def span_by_the_paper(schedule: Schedule, costs: ChunkCosts) -> float:
    """Return the last end of interleaved 1F1B if micro-batches other than the first of a group wait for no turn.

    A turn is the link from the last stage to the first one, or back. The actions are those of the schedule.
    """
    stages, last, seconds = schedule.stages, schedule.chunks - 1, costs.durations()
    end: dict[tuple[str, int, int], float] = {}
    free, cursor = [0.0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.actions):
            while cursor[stage] < len(actions):
                action = actions[cursor[stage]]
                kind, chunk, k = action.kind, action.chunk, action.microbatch
                source = chunk - 1 if kind == "F" else chunk + 1
                turn = 0 <= source <= last and abs(schedule.placement[source] - stage) == stages - 1 and stages > 1
                arrived = 0.0
                if 0 <= source <= last and not (turn and k % stages):
                    arrived = end.get((kind, source, k), math.inf) + costs.link(
                        kind, min(source, chunk), max(source, chunk), schedule.placement
                    )
                if arrived == math.inf:
                    break
                free[stage] = end[kind, chunk, k] = max(free[stage], arrived) + seconds[kind][chunk]
                cursor[stage] += 1
                moved = True
    assert cursor == [len(actions) for actions in schedule.actions], "every action has run"
    return max(free)


def spans(row: Row, *, waiting: bool = False) -> dict[str, float]:
    """Return the largest span of a stage in milliseconds, by schedule; ``1f1b_i_full`` waits for every message."""
    costs, found = row.costs(waiting=waiting), {}
    for key, name in _EXACT.items():
        found[key] = simulate(make_schedule(name, stages=row.p, microbatches=row.m), costs).period
    for key, depth in (("zb_1p", 1), ("zb_2p", 2)):
        found[key] = search_order(row.p, row.m, costs, depth, overlap=True).period
    schedule = make_schedule("interleaved", stages=row.p, microbatches=row.m, chunks=row.chunks)
    finer = row.costs(row.chunks, waiting=waiting)
    found["1f1b_i_full"] = simulate(schedule, finer).period
    found["1f1b_i"] = found["1f1b_i_full"] if waiting else span_by_the_paper(schedule, finer)
    return found


def bubble_rates(row: Row) -> dict[str, float]:
    """Return the bubble rate of each schedule as the paper counts it."""
    return {name: 1 - row.work / span for name, span in spans(row).items()}


def throughputs(row: Row) -> dict[str, float]:
    """Return samples per GPU and second of each schedule that the paper measured, if stages wait for their messages."""
    found = spans(row, waiting=True)
    return {name: 1e3 * row.m * row.b / (row.p * found[name]) for name in row.samples_per_gpu_s}


def published() -> str:
    """Return ours beside the paper's as a table."""
    names = ("1f1b", "1f1b_i", "zb_h1", "zb_h2", "zb_1p", "zb_2p")
    lines = ["bubble rate, ours / paper; then throughput relative to 1f1b, ours / measured by the paper"]
    lines.append(f"{'model':7}{'p':>3}{'m':>5}" + "".join(f"{name:>16}" for name in names))
    for row in rows():
        ours, rates = bubble_rates(row), throughputs(row)
        cells = [f"{ours[name]:.4f} / {row.bubble[name]:.4f}" for name in names]
        lines.append(f"{row.model:7}{row.p:>3}{row.m:>5}" + "".join(f"{cell:>17}" for cell in cells)[1:])
        measured = row.samples_per_gpu_s
        cells = [
            f"{rates[name] / rates['1f1b']:.3f} / {measured[name] / measured['1f1b']:.3f}" if name in measured else ""
            for name in names
        ]
        lines.append(" " * 15 + "".join(f"{cell:>17}" for cell in cells)[1:])
    return "\n".join(lines)
