"""Timelines and plans for the terminal."""

from __future__ import annotations

import re

from pipepart.planning.describe import describe, format_bytes, format_seconds
from pipepart.planning.plan import Plan
from pipepart.report.account import Account
from pipepart.report.replicas_only import Alternative
from pipepart.report.timelines import implied_receives
from pipepart.schedule import Event, Timeline, gantt

__all__ = ["account_text", "gantt_text", "plan_text"]

_MARGIN = {False: len("stage  0  "), True: len("stage  0 chunk  0  ")}
_CELL = re.compile("\x1b\\[[0-9]+m.\x1b\\[0m|.")
_SIGNS = {"RECV": "<", "SEND": ">"}
_COLOURS = {"RECV": "90", "SEND": "36"}
_LEGEND = "0-9 forward, A-Z backward (or input half), a-z weight half, ~ reduce, > send, < receive, . idle"


def gantt_text(timeline: Timeline, width: int = 100, *, color: bool = False) -> str:
    """Return a Gantt chart for a terminal of that width, with its figures and legend below it."""
    several = any(len({event.action.chunk for event in mine}) > 1 for mine in timeline.compute)
    margin = _MARGIN[several]
    chart = gantt(timeline, width=max(10, width - margin), color=color)
    chart = "\n".join(_with_messages(timeline, chart.splitlines(), margin, several, color))
    busy = ", ".join(f"{seconds / timeline.step_time:.0%}" for seconds in timeline.busy) if timeline.step_time else "-"
    figures = f"step {format_seconds(timeline.step_time)}, bubble {timeline.bubble:.1%}, busy by stage: {busy}"
    return f"{chart}\n{figures}\n{_LEGEND}"


def _with_messages(timeline: Timeline, lines: list[str], margin: int, several: bool, color: bool) -> list[str]:
    """Show messages in idle cells. Sends come last: a stage that does both waits for the send."""
    rows = {line[:margin].strip(): (line[:margin], _CELL.findall(line[margin:])) for line in lines}
    messages = [event for event in (*timeline.events, *implied_receives(timeline)) if event.action.kind in _SIGNS]
    for event in sorted(messages, key=lambda e: e.action.kind):
        name = f"stage {event.stage:>2}" + (f" chunk {event.action.chunk:>2}" if several else "")
        if name not in rows or not timeline.step_time:
            continue
        cells = rows[name][1]
        sign = _SIGNS[event.action.kind]
        sign = f"\x1b[{_COLOURS[event.action.kind]}m{sign}\x1b[0m" if color else sign
        for column in _columns(event, timeline.step_time / len(cells), len(cells)):
            if cells[column] == "." or _SIGNS["RECV"] in cells[column]:
                cells[column] = sign
    return [head + "".join(cells) for head, cells in rows.values()]


def _columns(event: Event, unit: float, count: int) -> range:
    """Return the columns whose middle lies within an event."""
    first = max(0, -int(-(event.start / unit - 0.5 + 1e-9) // 1))
    return range(first, min(count, -int(-(event.end / unit - 0.5 - 1e-9) // 1)))


def account_text(account: Account) -> str:
    """Return the parts of a step as a table, with the other ways to train and the advice below it."""
    rows = [(part.name, part.seconds, part.meaning) for part in account.parts]
    rows.append(("step", account.step, f"mean of {account.steps} usual steps, over all devices"))
    lines = ["where the time of a step goes"]
    for name, seconds, meaning in rows:
        share = seconds / account.step if account.step else 0.0
        lines.append(f"  {name:<13} {format_seconds(seconds):>10} {share:>6.1%}  {meaning}")
    for other in account.alternatives:
        lines.append(f"  {other.name}: about {format_seconds(other.seconds)} a step{_conditions(other)}")
    return "\n".join([*lines, f"  {account.advice}"])


def _conditions(other: Alternative) -> str:
    """Return the exchange of a way to train, and its memory."""
    exchange = f", {format_seconds(other.exchange)} of it exchange" + (" over an assumed link" if other.assumed else "")
    memory = f", {format_bytes(other.memory)} on each device" if other.memory is not None else ""
    return exchange + memory + (", more than a device has" if other.fits is False else "")


def plan_text(
    plan: Plan,
    measured: Timeline | None = None,
    width: int = 100,
    *,
    color: bool = False,
    account: Account | None = None,
) -> str:
    """Return the table of a plan, its predicted step as a chart, the measured step, and where its time went."""
    parts = [describe(plan), "predicted\n" + gantt_text(plan.timeline, width, color=color)]
    if measured is not None:
        error = plan.predicted / measured.step_time - 1 if measured.step_time else 0.0
        parts.append(f"measured (prediction {error:+.1%})\n" + gantt_text(measured, width, color=color))
    if account is not None:
        parts.append(account_text(account))
    return "\n\n".join(parts)
