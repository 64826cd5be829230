"""The pictures of the documentation: schedules, bubbles, cuts and memory, as pipepart itself simulates and plans them.

python -m tools.docs.pictures            # writes docs/pictures/*.svg, each for a light and a dark page

Schedules are drawn for equal stages: a forward takes 1 ms, a backward 2 ms. Memory and cuts are those of a plan of the gallery.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipepart.planning.describe import format_bytes
from pipepart.planning.plan import Plan
from pipepart.report.svg import STAGES, Drawing, draw_chart, static_svg
from pipepart.schedule import ChunkCosts, Timeline, make_schedule, simulate
from tools.docs.plans import FOLDER as PLANS

__all__ = ["FOLDER", "pictures"]

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
THEMES = {"": "light", "_dark": "dark"}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
DRAWN = (*SCHEDULES, "v_half")
"""Schedules with a picture of their own."""
_WIDTH = 900.0
_UNIT = 1e-3
"""Seconds of a forward of a stage: one millisecond, so that the charts print round figures."""


def _even(name: str, stages: int = 4, microbatches: int = 8) -> Timeline:
    """A step on equal stages without messages."""
    schedule = make_schedule(name, stages=stages, microbatches=microbatches)
    chunks = schedule.chunks // stages
    costs = ChunkCosts.even(stages, chunks, forward=_UNIT, backward_input=_UNIT, backward_weight=_UNIT)
    return simulate(schedule, costs, costs.edges)


def _charts(rows: Sequence[tuple[str, Timeline]], theme: str, title: str) -> str:
    """Timelines below each other, on one scale."""
    drawing, y = Drawing(_WIDTH, theme), 0.0
    span = max(timeline.step_time for _, timeline in rows)
    for label, timeline in rows:
        y = draw_chart(drawing, timeline, label, y + 4, span)
    return drawing.finish(y + 6, title)


def _schedule(name: str, theme: str) -> str:
    return _charts([(name, _even(name))], theme, f"{name} on 4 stages with 8 micro-batches")


def _numbers(theme: str) -> str:
    """The same work with more micro-batches: the bubble becomes a smaller part of the step."""
    rows = []
    for count in (2, 4, 8):
        schedule = make_schedule("1f1b", stages=4, microbatches=count)
        part = _UNIT * 8 / count
        costs = ChunkCosts.even(4, forward=part, backward_input=part, backward_weight=part)
        rows.append((f"{count} micro-batches", simulate(schedule, costs, costs.edges)))
    return _charts(rows, theme, "one batch as 2, 4 and 8 micro-batches")


def _balance(theme: str) -> str:
    """Two cuts of the same layers: the slowest stage sets the time of the step."""
    rows = []
    for label, loads in {"equal numbers of layers": (1.6, 1.0, 1.0, 0.4), "equal times": (1.0, 1.0, 1.0, 1.0)}.items():
        one = tuple(load * _UNIT for load in loads)
        costs = ChunkCosts(one, one, one)
        rows.append((label, simulate(make_schedule("1f1b", stages=4, microbatches=8), costs, costs.edges)))
    return _charts(rows, theme, "two cuts of the same model")


class _Plot:
    """Axes with lines."""

    def __init__(self, theme: str, height: float, across: tuple[float, float], up: float, left: float = 60) -> None:
        self.drawing, self.height, self.left, self.top = Drawing(_WIDTH, theme), height, left, 14.0
        self.across, self.up = across, up

    def x(self, value: float) -> float:
        low, high = self.across
        return self.left + (value - low) / (high - low) * (_WIDTH - self.left - 150)

    def y(self, value: float) -> float:
        return self.top + (1 - value / self.up) * self.height

    def axes(self, across: Sequence[float], up: Sequence[float], words: str, form: str = "g") -> None:
        for value in up:
            d = f"M{self.x(self.across[0]):.1f} {self.y(value):.1f}H{self.x(self.across[1]):.1f}"
            self.drawing.path(d, self.drawing.faint)
            self.drawing.text(
                self.left - 8, self.y(value) + 4, format(value, form), anchor="end", fill=self.drawing.soft
            )
        for value in across:
            self.drawing.text(self.x(value), self.y(0) + 16, f"{value:g}", anchor="middle", fill=self.drawing.soft)
        self.drawing.text(self.x(sum(self.across) / 2), self.y(0) + 34, words, anchor="middle", fill=self.drawing.soft)

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        d = "M" + "L".join(f"{self.x(a):.1f} {self.y(b):.1f}" for a, b in points)
        self.drawing.path(d, colour, ' stroke-width="2"')

    def name(self, right: float, height: float, colour: str, words: str) -> None:
        """An entry of the legend, beside the right end of the axis."""
        self.drawing.path(f"M{self.x(right) + 14:.1f} {self.y(height):.1f}h18", colour, ' stroke-width="2"')
        self.drawing.text(self.x(right) + 38, self.y(height) + 4, words)

    def finish(self, title: str) -> str:
        return self.drawing.finish(self.height + self.top + 44, title)


def _bubbles(theme: str) -> str:
    """The share of idle time by the number of micro-batches, for each schedule."""
    plot = _Plot(theme, 260, (4, 32), 0.5)
    plot.axes((4, 8, 16, 24, 32), (0, 0.1, 0.2, 0.3, 0.4, 0.5), "micro-batches (4 stages)", ".0%")
    for name, colour, height in zip(SCHEDULES, STAGES, (0.47, 0.42, 0.37, 0.32, 0.27, 0.22)):
        points = [(n, _even(name, 4, n).bubble) for n in range(4, 33, 4)]
        plot.line(points, colour)
        plot.name(32, height, colour, name)
    return plot.finish("bubble by schedule and number of micro-batches")


def _live(theme: str) -> str:
    """The micro-batches whose activations the first stage keeps, during a step."""
    lines = {name: _even(name) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v")}
    span = max(timeline.step_time for timeline in lines.values()) / _UNIT
    plot = _Plot(theme, 230, (0, span), 8)
    plot.axes(range(0, int(span) + 1, 4), range(0, 9, 2), "time in a step (one forward is 1)")
    for (name, timeline), colour, height in zip(lines.items(), STAGES, (7.6, 6.8, 6.0, 5.2, 4.4)):
        points: list[tuple[float, float]] = []
        for time, level in timeline.memory[0]:
            points += [(time / _UNIT, points[-1][1])] if points else []
            points.append((time / _UNIT, level))
        plot.line(points, colour)
        plot.name(span, height, colour, f"{name}: at most {max(timeline.peak_activations):g}")
    return plot.finish("activations of the first stage during a step")


def _bars(theme: str, plan: Plan) -> str:
    """The predicted memory of each stage of a plan, part by part."""
    names = ("weights", "gradients", "optimizer", "activations", "scratch")
    drawing, left = Drawing(_WIDTH, theme), 70.0
    most = max(stage.total for stage in plan.memory)
    y = 10.0
    for number, stage in enumerate(plan.memory):
        drawing.text(10, y + 16, f"stage {number}", fill=drawing.soft)
        x = left
        for name, colour in zip(names, STAGES):
            width = getattr(stage, name) / most * (_WIDTH - left - 110)
            drawing.rect(x, y, width, 22, colour)
            x += width
        drawing.text(x + 8, y + 16, format_bytes(stage.total))
        y += 30
    x = left
    for name, colour in zip(names, STAGES):
        drawing.rect(x, y + 6, 11, 11, colour)
        drawing.text(x + 16, y + 15.5, name, fill=drawing.soft)
        x += 40 + 6.5 * len(name)
    return drawing.finish(y + 26, "predicted memory of each stage")


def pictures() -> dict[str, str]:
    """All pictures by the name of their file."""
    plan, made = Plan.load(PLANS / "gpt" / "plan.json"), {}
    for suffix, theme in THEMES.items():
        found = {f"schedule_{name}": _schedule(name, theme) for name in DRAWN}
        found |= {"microbatches": _numbers(theme), "balance": _balance(theme), "bubbles": _bubbles(theme)}
        found |= {"live": _live(theme), "memory": _bars(theme, plan), "plan": static_svg(plan, theme=theme)}
        made |= {f"{name}{suffix}.svg": text for name, text in found.items()}
    return made


def main() -> None:
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
