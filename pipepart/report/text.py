"""Timelines and plans for the terminal."""

from __future__ import annotations

from pipepart.planning.describe import describe, format_seconds
from pipepart.planning.plan import Plan
from pipepart.schedule import Event, Timeline

__all__ = ["gantt_text", "plan_text"]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = {"F": "\x1b[44;97m", "B": "\x1b[43;30m", "I": "\x1b[41;97m", "W": "\x1b[45;97m"}
_RESET = "\x1b[0m"


def _letter(event: Event) -> str:
    """Digits are forwards, capitals backwards (or input gradients), small letters weight gradients."""
    k = event.action.microbatch
    if event.action.kind == "F":
        return str(k % 10)
    letter = _LETTERS[k % len(_LETTERS)]
    return letter.lower() if event.action.kind == "W" else letter


def _row(events: tuple[Event, ...], step: float, cells: int, colour: bool) -> str:
    """One stage: every cell shows the action that fills most of it, a dot if idling does."""
    length = step / cells
    filled = [0.0] * cells
    shown: list[Event | None] = [None] * cells
    idle = [length] * cells
    for event in events:
        first = min(cells - 1, int(event.start / length))
        last = min(cells - 1, max(first, int(event.end / length - 1e-9)))
        for cell in range(first, last + 1):
            share = min(event.end, (cell + 1) * length) - max(event.start, cell * length)
            idle[cell] -= share
            if share > filled[cell]:
                filled[cell], shown[cell] = share, event
    text = ""
    for cell in range(cells):
        event = shown[cell]
        if event is None or idle[cell] > filled[cell]:
            text += "."
        else:
            text += f"{_COLOURS[event.action.kind]}{_letter(event)}{_RESET}" if colour else _letter(event)
    return text


def gantt_text(timeline: Timeline, width: int = 100, *, colour: bool = False) -> str:
    """A Gantt chart of letters, one row per stage, for a terminal of that width.

    ::

        stage 0  001122......AA33BB..CC..DD   67 %
        stage 1  ..0011..AA22BB33CCDD......   75 %

    Digits are the last digit of a forward's micro-batch; capitals are backwards (A is micro-batch 0), or input
    gradients where the backward is split; small letters weight gradients; a dot is idle time.
    """
    step = timeline.step_time
    names = [f"stage {stage}" for stage in range(timeline.stages)]
    margin = max(map(len, names), default=0)
    cells = max(10, width - margin - 2 - 7)
    lines = []
    for name, events, busy in zip(names, timeline.compute, timeline.busy):
        share = f"{busy / step:>5.0%}" if step else "    -"
        row = _row(events, step, cells, colour) if step else "." * cells
        lines.append(f"{name.ljust(margin)}  {row}  {share}")
    kinds = {event.action.kind for mine in timeline.compute for event in mine}
    split = ", small letters weight gradients" if "W" in kinds else ""
    back = ", capitals input gradients" if "I" in kinds else ", capitals backwards" if "B" in kinds else ""
    lines.append(f"0 to {format_seconds(step)}, bubble {timeline.bubble:.1%}; digits forwards{back}{split}, dots idle")
    return "\n".join(lines)


def plan_text(plan: Plan, measured: Timeline | None = None, width: int = 100, *, colour: bool = False) -> str:
    """A plan for ssh: its table, its predicted step as a chart, and the measured one under it."""
    parts = [describe(plan), "predicted\n" + gantt_text(plan.timeline, width, colour=colour)]
    if measured is not None:
        error = plan.step_time / measured.step_time - 1 if measured.step_time else 0.0
        parts.append(f"measured (prediction {error:+.1%})\n" + gantt_text(measured, width, colour=colour))
    return "\n\n".join(parts)
