"""Timelines and plans for the terminal."""

from __future__ import annotations

from pipepart.planning.describe import describe, format_seconds
from pipepart.planning.plan import Plan
from pipepart.schedule.gantt import GANTT_LEGEND, gantt
from pipepart.schedule.timeline import Timeline

__all__ = ["gantt_text", "plan_text"]

_MARGIN = {False: len("stage  0  "), True: len("stage  0 chunk  0  ")}


def gantt_text(timeline: Timeline, width: int = 100, *, color: bool = False) -> str:
    """A Gantt chart of letters for a terminal of that width, with its figures and legend below it."""
    several = any(len({event.action.chunk for event in mine}) > 1 for mine in timeline.compute)
    chart = gantt(timeline, width=max(10, width - _MARGIN[several]), color=color)
    busy = ", ".join(f"{seconds / timeline.step_time:.0%}" for seconds in timeline.busy) if timeline.step_time else "-"
    figures = f"step {format_seconds(timeline.step_time)}, bubble {timeline.bubble:.1%}, busy by stage: {busy}"
    return f"{chart}\n{figures}\n{GANTT_LEGEND}"


def plan_text(plan: Plan, measured: Timeline | None = None, width: int = 100, *, color: bool = False) -> str:
    """A plan for ssh: its table, its predicted step as a chart, and the measured one under it."""
    parts = [describe(plan), "predicted\n" + gantt_text(plan.timeline, width, color=color)]
    if measured is not None:
        error = plan.step_time / measured.step_time - 1 if measured.step_time else 0.0
        parts.append(f"measured (prediction {error:+.1%})\n" + gantt_text(measured, width, color=color))
    return "\n\n".join(parts)
