"""A timeline as text: one row per stage (and chunk, where a stage holds several), time runs to the right."""

from __future__ import annotations

from pipepart.schedule.timeline import Event, Timeline

__all__ = ["GANTT_LEGEND", "gantt"]

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

    A column shows what runs in its middle, so actions shorter than a column can be missing; a smaller unit shows them.
    """
    step = timeline.step_time
    unit = unit or (step / max(width, 1) or 1.0)
    columns = max(1, round(step / unit))
    chunks_of: list[set[int]] = [set() for _ in range(timeline.stages)]
    for mine in timeline.compute:
        for event in mine:
            chunks_of[event.stage].add(event.action.chunk)
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
