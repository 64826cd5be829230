"""A partition and its schedule as one standalone SVG, for papers and web pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from pipepart.files import write_whole
from pipepart.planning.chunks import ChunkPlan, Traffic
from pipepart.planning.describe import format_bytes, format_seconds
from pipepart.planning.plan import Plan
from pipepart.report.timelines import flows, implied_receives
from pipepart.schedule import COMPUTE, Timeline
from pipepart.values import printable

__all__ = ["KINDS", "STAGES", "Drawing", "draw_chart", "static_svg", "write_svg"]

STAGES = (
    "#3b7dd8", "#e8833a", "#2a9d6f", "#c9489a", "#8a63d2", "#b8930b", "#1799ad", "#d64545",
    "#6b8e23", "#9c6644", "#5c6bc0", "#7a8794", "#00796b", "#ad1457", "#8d9a00", "#4e5a9a",
)  # fmt: skip
KINDS = {
    "F": "#4c86e8", "B": "#ef9b3b", "I": "#d9783d", "W": "#9a76d8", "SEND": "#2f9e8f", "RECV": "#8f9bab", "REDUCE": "#c05299",
}  # fmt: skip
_NAMES = {
    "F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "SEND": "send", "RECV": "receive",
    "REDUCE": "gradient sum",
}  # fmt: skip
_MANY_ARROWS = 240
"""A chart with more messages has no arrows, since they would hide it."""
_THEMES = {"light": ("#ffffff", "#1a1f27", "#5a6472", "#eef0f4"), "dark": ("#12151b", "#e6e9ef", "#9aa5b5", "#232a35")}
_LETTER = 6.1
"""Approximate width of a letter of 11 px."""


class Drawing:
    """The elements of a picture, with the colours of a theme."""

    def __init__(self, width: float, theme: str) -> None:
        self.width = width
        self.paper, self.ink, self.soft, self.faint = _THEMES[theme]
        self.parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, more: str = "") -> None:
        size = f'width="{max(0.0, width):.2f}" height="{height:.2f}"'
        self.parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" {size} fill="{fill}"{more}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 11,
        fill: str = "",
        anchor: str = "start",
        bold: bool = False,
        halo: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        if halo:  # in front of lines
            weight += f' stroke="{self.paper}" stroke-width="3" paint-order="stroke"'
        self.parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" fill="{fill or self.ink}" text-anchor="{anchor}"{weight}>'
            f"{escape(printable(words))}</text>"
        )

    def path(self, d: str, stroke: str, more: str = "") -> None:
        self.parts.append(f'<path d="{d}" fill="none" stroke="{stroke}"{more}/>')

    def finish(self, height: float, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{height:g}" '
            f'viewBox="0 0 {self.width:g} {height:g}" font-family="Helvetica, Arial, sans-serif" role="img">'
        )
        label = f"<title>{escape(printable(title))}</title>"
        paper = f'<rect width="{self.width:g}" height="{height:g}" fill="{self.paper}"/>'
        return "\n".join([head, label, paper, *self.parts, "</svg>"]) + "\n"


def _fit(words: str, width: float) -> str:
    """Return as much of the end of a name as fits."""
    room = int(width / _LETTER)
    if len(words) <= room:
        return words
    return "…" + words[len(words) - room + 1 :] if room > 1 else ""


@dataclass(frozen=True)
class _Grid:
    """The places of chunks: boxes in rows, with room for messages between them and for skips above them."""

    left: float
    top: float
    per_row: int
    box: float
    """Width of a box."""
    hop: float = 46.0
    """Distance between boxes."""
    height: float = 66.0

    def corner(self, chunk: int) -> tuple[float, float]:
        row, column = divmod(chunk, self.per_row)
        return self.left + column * (self.box + self.hop), self.top + row * (self.height + 26)


def _partition(drawing: Drawing, plan: Plan, top: float) -> float:
    """Draw the chunks in rows, the messages from each to the next, and skips as arcs above a single row."""
    count = len(plan.chunks)
    per_row = min(count, max(1, int((drawing.width - 20) // 150)))
    rows = -(-count // per_row)
    skips = sorted((item for item in plan.traffic if item.skip), key=lambda item: item.target - item.source)
    above = 10.0 + 15 * min(3, len(skips)) if skips and rows == 1 else 8.0
    grid = _Grid(10, top + above, per_row, (drawing.width - 20 - _Grid.hop * (per_row - 1)) / per_row)
    traffic = {(item.source, item.target): item for item in plan.traffic}
    for index, chunk in enumerate(plan.chunks):
        name = f"stage {chunk.stage}" + (f", chunk {index}" if plan.chunks_per_stage > 1 else "")
        _box(drawing, grid, index, chunk, name)
        if (index, index + 1) in traffic:
            _hop(drawing, grid, traffic[index, index + 1])
    for number, item in enumerate(skips[:12] if rows == 1 else ()):
        _arc(drawing, grid, item, lift=14 + 18 * (number % 3))  # longer ones pass above shorter ones
    return grid.top + rows * (grid.height + 26)


def _box(drawing: Drawing, grid: _Grid, index: int, chunk: ChunkPlan, name: str) -> None:
    (x, y), room = grid.corner(index), grid.box - 12
    colour = STAGES[chunk.stage % len(STAGES)]
    drawing.rect(x, y, grid.box, grid.height, colour, ' fill-opacity="0.12" rx="5"')
    drawing.rect(x, y, grid.box, 4, colour)
    last = chunk.last if chunk.last != chunk.first else ""
    drawing.text(x + 8, y + 19, _fit(name, room), bold=True)
    drawing.text(x + 8, y + 33, _fit(chunk.first, room), fill=drawing.soft, size=10)
    drawing.text(x + 8, y + 46, _fit(last, room), fill=drawing.soft, size=10)
    times = f"F {format_seconds(chunk.forward)}  B {format_seconds(chunk.backward)}"
    drawing.text(x + 8, y + 60, _fit(times, room), size=10)


def _hop(drawing: Drawing, grid: _Grid, item: Traffic) -> None:
    """Draw the message from a chunk to the next one: an arrow, or words at the end of a row."""
    (x, y), sent = grid.corner(item.source), format_bytes(item.forward_bytes)
    x += grid.box
    if item.target % grid.per_row:
        middle = y + grid.height / 2
        d = f"M{x + 3:.1f} {middle:.1f}h{grid.hop - 10:.1f}"
        drawing.path(d, drawing.soft, ' stroke-width="1.4" marker-end="url(#tip)"')
        drawing.text(x + grid.hop / 2, middle - 5, sent, size=9, fill=drawing.soft, anchor="middle")
    else:
        words = f"{sent} to chunk {item.target}"
        drawing.text(x, y + grid.height + 14, words, size=9, fill=drawing.soft, anchor="end")


def _arc(drawing: Drawing, grid: _Grid, item: Traffic, lift: float) -> None:
    """Draw a skip as an arc above the chunks."""
    (a, y), (b, _) = grid.corner(item.source), grid.corner(item.target)
    a, b = a + grid.box / 2, b + grid.box / 2
    d = f"M{a:.1f} {y:.1f}C{a:.1f} {y - lift:.1f} {b:.1f} {y - lift:.1f} {b:.1f} {y - 1:.1f}"
    drawing.path(d, drawing.soft, ' stroke-dasharray="5 3" marker-end="url(#tip)"')
    words, middle = format_bytes(item.forward_bytes), (a + b) / 2
    drawing.text(middle, y - lift * 0.75 - 3, words, size=9, fill=drawing.soft, anchor="middle", halo=True)


def draw_chart(drawing: Drawing, timeline: Timeline, label: str, top: float, span: float) -> float:
    """Draw a timeline as a Gantt chart of `span` seconds, with receives above and sends below the compute of a stage."""
    left, plot, lane, strip = 62.0, drawing.width - 72, 18.0, 3.5
    scale = plot / span if span else 0.0
    figures = f"{label}: {format_seconds(timeline.step_time)}, bubble {timeline.bubble:.1%}"
    drawing.text(10, top + 12, figures, bold=True)
    y = top + 20 + strip
    rows = []
    for stage in range(timeline.stages):
        rows.append(y)
        drawing.text(10, y + 13, f"stage {stage}", fill=drawing.soft)
        drawing.rect(left, y, timeline.step_time * scale, lane, drawing.faint)
        y += lane + 2 * strip + 8
    received = implied_receives(timeline)
    for event in (*timeline.events, *received):
        kind = event.action.kind
        x, width = left + event.start * scale, event.duration * scale
        compute = kind in COMPUTE
        edge = f' stroke="{drawing.paper}" stroke-width="0.5"'
        above = 0.0 if compute else -strip if kind == "RECV" else lane
        drawing.rect(x, rows[event.stage] + above, width, lane if compute else strip, KINDS[kind], edge)
        words = str(event.action.microbatch)
        if compute and width > len(words) * 6 + 3:
            ink = "#ffffff" if kind in ("F", "W") else "#241500"
            drawing.text(x + width / 2, rows[event.stage] + 13, words, size=10, fill=ink, anchor="middle")
    messages = flows(timeline, received)
    for flow in messages if len(messages) <= _MANY_ARROWS else ():
        (leave, arrive), down = flow.times, flow.consumer.stage > flow.producer.stage
        if arrive >= leave:
            x1, x2 = left + leave * scale, left + arrive * scale
            y1 = rows[flow.producer.stage] + (lane + strip if down else -strip)
            y2 = rows[flow.consumer.stage] + (-strip if down else lane + strip)
            drawing.path(
                f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}",
                drawing.soft,
                ' stroke-width="0.8" opacity="0.7" marker-end="url(#tip)"',
            )
    return y


def static_svg(
    plan: Plan, *, measured: Timeline | None = None, width: float = 900, theme: str = "light", title: str = ""
) -> str:
    """Return a standalone SVG with the partition above its schedule, predicted and (if given) measured."""
    drawing = Drawing(width, theme)
    drawing.parts.append(
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0L6 3L0 6z" fill="{drawing.soft}"/></marker></defs>'
    )
    heading = title or f"{plan.stages} stages, {plan.schedule}, {plan.microbatches} micro-batches"
    drawing.text(10, 20, heading, size=14, bold=True)
    y = _partition(drawing, plan, 28)
    timelines = [("predicted", plan.timeline)]
    if measured is not None:
        timelines.append(("measured", measured if measured.edges is not None else replace(measured, edges=plan.edges)))
    span = max(timeline.step_time for _, timeline in timelines)
    for label, timeline in timelines:
        y = draw_chart(drawing, timeline, label, y + 4, span)
    kinds = {e.action.kind for _, timeline in timelines for e in (*timeline.events, *implied_receives(timeline))}
    x = 10.0
    for kind in (kind for kind in KINDS if kind in kinds):
        drawing.rect(x, y + 8, 11, 11, KINDS[kind])
        drawing.text(x + 16, y + 17.5, _NAMES[kind], fill=drawing.soft)
        x += 34 + len(_NAMES[kind]) * _LETTER
    return drawing.finish(y + 28, heading)


def write_svg(path: str | Path, plan: Plan, **options: Any) -> Path:
    """Write `static_svg` with these options to a file."""
    write_whole(path, static_svg(plan, **options))
    return Path(path)
