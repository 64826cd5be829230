"""A schedule in time: predicted by the simulator or measured by the runtime, in one type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipepart.schedule.actions import COMPUTE, Action, Edges

__all__ = ["Event", "Timeline"]


@dataclass(frozen=True, slots=True)
class Event:
    """An action with its start and end in seconds. The stage of a ``SEND`` is the sender's."""

    stage: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """All events of one step, and what can be read from them.

    Only compute actions keep a device busy. ``SEND`` events (the time on the link), ``RECV`` events (waiting) and
    ``REDUCE`` events count for the length of the step, not as work.
    """

    stages: int
    events: tuple[Event, ...] = field(repr=False)
    """Ordered by start."""
    edges: Edges | None = field(default=None, repr=False)
    activation: tuple[float, ...] = ()
    """What one micro-batch of each chunk weighs; empty: 1 for each."""
    kept_for_weight: float = 1.0

    @staticmethod
    def from_events(
        stages: int,
        events: Iterable[Event],
        *,
        edges: Edges | None = None,
        activation: Sequence[float] = (),
        kept_for_weight: float = 1.0,
    ) -> Timeline:
        """A timeline of measured (or any other) events, with time starting at the first of them."""
        ordered = sorted(events, key=lambda event: (event.start, event.end, event.stage))
        origin = ordered[0].start if ordered else 0.0
        if origin:
            ordered = [Event(e.stage, e.action, e.start - origin, e.end - origin) for e in ordered]
        return Timeline(stages, tuple(ordered), edges, tuple(activation), kept_for_weight)

    @cached_property
    def step_time(self) -> float:
        """From the first start to the last end of anything."""
        return max((event.end for event in self.events), default=0.0) - min((e.start for e in self.events), default=0.0)

    @cached_property
    def compute(self) -> tuple[tuple[Event, ...], ...]:
        """Per stage: its compute events by start."""
        found: list[list[Event]] = [[] for _ in range(self.stages)]
        for event in self.events:
            if event.action.kind in COMPUTE:
                found[event.stage].append(event)
        return tuple(map(tuple, found))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per stage: seconds of compute."""
        return tuple(sum(event.end - event.start for event in mine) for mine in self.compute)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Per stage: seconds of the step without compute."""
        return tuple(self.step_time - busy for busy in self.busy)

    @cached_property
    def bubble(self) -> float:
        """The part of all device time in the step that is idle."""
        whole = self.step_time * self.stages
        return sum(self.idle) / whole if whole else 0.0

    @cached_property
    def period(self) -> float:
        """The longest time from a stage's own first start to its own last end.

        That is what a step costs in a row of steps when no barrier stands between them: the next step's first
        forwards run while this step's last backwards do.
        """
        spans = [max(e.end for e in mine) - mine[0].start for mine in self.compute if mine]
        return max(spans, default=0.0)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Per stage: (time, live activations) at each change."""
        full = {e.action.chunk for mine in self.compute for e in mine if e.action.kind in ("B", "W")}
        curves = []
        for mine in self.compute:
            changes: list[tuple[float, int, float]] = []
            for event in mine:
                chunk, kind = event.action.chunk, event.action.kind
                size = self.activation[chunk] if self.activation else 1.0
                if kind == "F":
                    changes.append((event.start, 1, size))
                    if chunk not in full:
                        changes.append((event.end, 0, -size))
                elif kind == "I":
                    changes.append((event.end, 0, -size * (1 - self.kept_for_weight)))
                else:
                    split = kind == "W"
                    changes.append((event.end, 0, -size * (self.kept_for_weight if split else 1.0)))
            level, curve = 0.0, [(0.0, 0.0)]
            for time, _, change in sorted(changes):
                level += change
                if curve[-1][0] == time:
                    curve.pop()
                curve.append((time, level))
            curves.append(tuple(curve))
        return tuple(curves)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Per stage: the most that is live at once."""
        return tuple(max(level for _, level in curve) for curve in self.memory)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The chain of events that made the step as long as it is, first to last."""
        from pipepart.schedule.critical import critical_path

        return critical_path(self)
