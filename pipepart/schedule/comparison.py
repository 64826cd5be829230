"""Timelines and comparisons of schedules as plain text, for any terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Schedule
from pipepart.schedule.chunk_costs import ChunkCosts, lower_bound
from pipepart.schedule.registry import SCHEDULES, make_schedule
from pipepart.schedule.simulate import simulate
from pipepart.schedule.timeline import Event, Timeline
from pipepart.schedule.torch_csv import read_csv

__all__ = ["GANTT_LEGEND", "Row", "compare", "format_table", "gantt", "picture", "table"]


GANTT_LEGEND = "0-9 forward of a micro-batch, A-Z its backward (or input half), a-z its weight half, ~ reduce, . idle"

_COLORS = {"F": "34", "B": "32", "I": "36", "W": "33", "REDUCE": "35"}


def _symbol(event: Event) -> str:
    """One character for an action: digits repeat after 10 micro-batches, letters after 26."""
    kind, k = event.action.kind, event.action.microbatch
    if kind == "F":
        return str(k % 10)
    if kind == "REDUCE":
        return "~"
    return chr((ord("a") if kind == "W" else ord("A")) + k % 26)


def gantt(timeline: Timeline, *, width: int = 100, unit: float | None = None, color: bool = False) -> str:
    """The picture of a timeline. ``unit`` is the time of one column; without it the step fills ``width`` columns.

    A column shows the action that runs in its middle, so actions shorter than a column can be missing; a smaller unit
    shows them.
    """
    step = timeline.step_time
    unit = unit or (step / max(width, 1) or 1.0)
    columns = max(1, round(step / unit))
    chunks_of = [{event.action.chunk for event in mine} for mine in timeline.compute]
    rows: dict[tuple[int, int], list[str]] = {}
    for stage in range(timeline.stages):
        for chunk in sorted(chunks_of[stage]) or [-1]:
            rows[stage, chunk] = ["."] * columns
    for event in timeline.events:
        if event.action.kind in ("SEND", "RECV"):
            continue
        row = rows[event.stage, event.action.chunk]
        first = max(0, -int(-(event.start / unit - 0.5 + 1e-9) // 1))
        last = min(columns - 1, -int(-(event.end / unit - 0.5 - 1e-9) // 1) - 1)
        symbol = _symbol(event)
        if color:
            symbol = f"\x1b[{_COLORS[event.action.kind]}m{symbol}\x1b[0m"
        for column in range(first, last + 1):
            row[column] = symbol
    several = any(len(chunks) > 1 for chunks in chunks_of)
    lines = []
    for (stage, chunk), row in rows.items():
        label = f"stage {stage:>2} chunk {chunk:>2}" if several else f"stage {stage:>2}"
        lines.append(f"{label}  {''.join(row)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Row:
    """One schedule under one set of costs. Times in units of the costs, activations in micro-batches of a stage."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    ratio: tuple[float, float, float]
    """F : I : W of a whole stage."""
    step_time: float
    bubble: float
    """Idle part of all device time in one step."""
    steady_bubble: float
    """Idle part of all device time over consecutive steps without a barrier between them."""
    peak: float
    bound: float
    """Step time that no order of these actions on this placement can beat."""

    @property
    def over(self) -> float:
        """Distance of the step time from the bound, relative to the bound."""
        return self.step_time / self.bound - 1


def _even(stages: int, chunks: int, ratio: tuple[float, float, float], send: float) -> ChunkCosts:
    forward, inputs, weights = ratio
    return ChunkCosts.even(stages, chunks, forward=forward, backward_input=inputs, backward_weight=weights, send=send)


def _row(name: str, schedule: Schedule, costs: ChunkCosts, ratio: tuple[float, float, float]) -> Row:
    timeline = simulate(schedule, costs)
    work = sum(timeline.busy)
    bound = lower_bound(schedule.placement, schedule.microbatches, costs, split=schedule.splits_backward)
    return Row(
        name,
        schedule.stages,
        schedule.microbatches,
        schedule.chunks // schedule.stages,
        ratio,
        timeline.step_time,
        timeline.bubble,
        1 - work / (schedule.stages * timeline.period),
        max(timeline.peak_activations),
        bound,
    )


def compare(
    stages: int,
    microbatches: int,
    chunks: Iterable[int] = (1, 2, 4),
    ratio: tuple[float, float, float] = (1.0, 1.0, 1.0),
    *,
    send: float = 0.0,
) -> tuple[Row, ...]:
    """All training schedules over equal stages.

    ``ratio`` is F : I : W of a stage, ``send`` the time of one message.
    """
    rows = []
    for count in chunks:
        costs = _even(stages, count, ratio, send)
        for name, kind in SCHEDULES.items():
            if name == "forward" or kind.fixed_chunks not in (None, count) or (count == 1 and kind.usual_chunks > 1):
                continue
            schedule = make_schedule(name, stages=stages, microbatches=microbatches, chunks=count)
            rows.append(_row(name, schedule, costs, ratio))
    return tuple(rows)


def format_table(rows: Sequence[Row]) -> str:
    """Rows as aligned text with a header."""
    header = ("schedule", "p", "m", "v", "F:I:W", "step", "bubble", "steady", "peak", "bound", "over")
    cells = [
        (
            row.schedule,
            str(row.stages),
            str(row.microbatches),
            str(row.chunks),
            ":".join(f"{part:g}" for part in row.ratio),
            f"{row.step_time:.6g}",
            f"{row.bubble:.4f}",
            f"{row.steady_bubble:.4f}",
            f"{row.peak:.4g}",
            f"{row.bound:.6g}",
            f"{round(100 * row.over, 1) + 0.0:.1f}%",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (header, *cells)) for column in range(len(header))]
    lines = []
    for line in (header, *cells):
        first = line[0].ljust(widths[0])
        lines.append("  ".join([first, *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]))
    return "\n".join(lines)


def table(
    stages: Iterable[int] = (4, 8),
    microbatches: Iterable[int] = (8, 24),
    chunks: Sequence[int] = (1, 2, 4),
    ratios: Sequence[tuple[float, float, float]] = ((1.0, 1.0, 1.0), (1.0, 1.0, 0.8), (1.0, 2.0, 1.0)),
    *,
    send: float = 0.0,
) -> str:
    """The whole comparison as text: a block per number of stages, micro-batches and ratio."""
    counts = list(microbatches)
    blocks = [format_table(compare(p, m, chunks, ratio, send=send)) for p in stages for m in counts for ratio in ratios]
    note = (
        "times in stage forwards; peak in micro-batches of a stage; steady: bubble of steps in a row without a barrier"
    )
    return "\n\n".join([note, *blocks])


def picture(
    name: str,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    ratio: tuple[float, float, float] = (1.0, 1.0, 1.0),
    send: float = 0.0,
    width: int = 160,
    color: bool = False,
) -> str:
    """The Gantt of a schedule over equal stages with its figures: by name (4 stages, 8 micro-batches), or from a file."""
    if name.endswith(".csv"):
        schedule = read_csv(name, stages=stages, microbatches=microbatches, chunks=chunks)
    else:
        schedule = make_schedule(name, stages=stages or 4, microbatches=microbatches or 8, chunks=chunks)
    held, rest = divmod(schedule.chunks, schedule.stages)
    if rest:
        raise ScheduleError(
            f"{schedule.name}: {schedule.chunks} chunks on {schedule.stages} stages; a picture needs the same number of "
            "chunks on each stage"
        )
    timeline = simulate(schedule, _even(schedule.stages, held, ratio, send))
    peaks = ", ".join(f"{peak:g}" for peak in timeline.peak_activations)
    head = f"step {timeline.step_time:g}, bubble {timeline.bubble:.4f}, peak activations {peaks}"
    column = min(part for part in (*ratio, send * held) if part) / held
    unit = column if timeline.step_time / column <= width else None
    return "\n".join([str(schedule), head, gantt(timeline, unit=unit, width=width, color=color), GANTT_LEGEND])
