"""Timelines: the actions of a step with start and end, predicted or measured, and their critical path."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from pipepart.schedule.actions import COMPUTE, Action, Edges

__all__ = ["Event", "Timeline"]

_CLOSE = 1e-12


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
    """All events of one step, and the figures that follow from them.

    Only compute actions keep a device busy. ``SEND`` events (the time on the link), ``RECV`` events (waiting) and
    ``REDUCE`` events count towards the length of the step, not as work.
    """

    stages: int
    events: tuple[Event, ...] = field(repr=False)
    """Ordered by start."""
    edges: Edges | None = field(default=None, repr=False)
    activation: tuple[float, ...] = ()
    """Size of the activations of one micro-batch for each chunk; empty: 1 for each."""
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
        """Seconds from the first start to the last end of any event."""
        return max((event.end for event in self.events), default=0.0) - min((e.start for e in self.events), default=0.0)

    @cached_property
    def compute(self) -> tuple[tuple[Event, ...], ...]:
        """Compute events of each stage, by start."""
        found: list[list[Event]] = [[] for _ in range(self.stages)]
        for event in self.events:
            if event.action.kind in COMPUTE:
                found[event.stage].append(event)
        return tuple(map(tuple, found))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of compute of each stage."""
        return tuple(sum(event.end - event.start for event in mine) for mine in self.compute)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the step without compute, for each stage."""
        return tuple(self.step_time - busy for busy in self.busy)

    @cached_property
    def bubble(self) -> float:
        """Share of all device time in the step that is idle."""
        whole = self.step_time * self.stages
        return sum(self.idle) / whole if whole else 0.0

    @cached_property
    def period(self) -> float:
        """The longest time from a stage's own first start to its own last end.

        This is the time per step if no barrier separates consecutive steps: the first forwards of the next step run
        beside the last backwards of this one.
        """
        spans = [max(e.end for e in mine) - mine[0].start for mine in self.compute if mine]
        return max(spans, default=0.0)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """(time, live activations) at each change, for each stage."""
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
                else:
                    released = {"B": 1.0, "I": 1 - self.kept_for_weight, "W": self.kept_for_weight}[kind]
                    changes.append((event.end, 0, -size * released))
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
        """Largest live activations of each stage."""
        return tuple(max(level for _, level in curve) for curve in self.memory)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The chain of events that determines the step time, first to last."""
        return _Waits(self).path()


class _Waits:
    """The events that each event of a timeline waited for.

    These are the event before it on its stage (compute) or on its link (SEND), the producer of the tensor that is sent,
    the messages that arrive, and the results made on the same stage. Measured events are treated alike: a gap between
    one event and the next is overhead that no event explains.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.computed: dict[tuple[str, int, int], Event] = {}
        self.sent: dict[tuple[str | None, int, int | None, int], Event] = {}
        self.lanes: dict[tuple[str, int], list[Event]] = {}
        self.home = {
            chunk: stage for stage, mine in enumerate(timeline.compute) for chunk in {e.action.chunk for e in mine}
        }
        for event in timeline.events:
            action = event.action
            if action.kind in COMPUTE:
                self.computed["B" if action.kind == "I" else action.kind, action.chunk, action.microbatch] = event
                lanes = [("compute", event.stage)]
            elif action.kind == "SEND":
                self.sent[action.payload, action.chunk, action.peer, action.microbatch] = event
                lanes = [("out", event.stage), ("in", self._receiver(action))]
            else:
                lanes = [("reduce", event.stage)] if action.kind == "REDUCE" else []
            for lane in lanes:
                self.lanes.setdefault(lane, []).append(event)
        for mine in self.lanes.values():
            mine.sort(key=attrgetter("end"))
        self.ends = {lane: [event.end for event in mine] for lane, mine in self.lanes.items()}
        edges = timeline.edges
        if edges is None:
            edges = Edges.chain(1 + max((event.action.chunk for event in timeline.events), default=0))
        self.sources: dict[int, list[int]] = {}
        self.targets: dict[int, list[int]] = {}
        for source, target in edges.forward:
            self.sources.setdefault(target, []).append(source)
        for source, target in edges.backward:
            self.targets.setdefault(source, []).append(target)

    def path(self) -> tuple[Event, ...]:
        """Walk back from the event that ends last, each time to the latest event for which it has waited."""
        if not self.timeline.events:
            return ()
        event = max(self.timeline.events, key=lambda e: (e.end, e.start))
        path, seen = [event], {id(event)}
        while True:
            limit = event.start + _CLOSE
            earlier = [e for e in self._of(event) if e is not None and id(e) not in seen and e.end <= limit]
            if not earlier:
                return tuple(reversed(path))
            event = max(earlier, key=attrgetter("end"))
            path.append(event)
            seen.add(id(event))

    def _of(self, event: Event) -> list[Event | None]:
        action = event.action
        chunk, k = action.chunk, action.microbatch
        if action.kind == "SEND":
            made = self.computed.get((action.payload or "F", chunk, k))
            return [made, self._before("out", event.stage, event), self._before("in", self._receiver(action), event)]
        same = self._before("compute", event.stage, event)
        if action.kind == "REDUCE":
            own = [same, self._before("reduce", event.stage, event)]
            if any(e is not None and e.end >= event.start - _CLOSE for e in own):
                return own
            return own + [self._before("compute", stage, event) for stage in range(self.timeline.stages)]
        if action.kind == "F":
            return [same, *(self._made("F", source, event) for source in self.sources.get(chunk, ()))]
        if action.kind == "W":
            return [same, self.computed.get(("B", chunk, k))]
        later = (self._made("B", target, event) for target in self.targets.get(chunk, ()))
        return [same, self.computed.get(("F", chunk, k)), *later]

    def _receiver(self, action: Action) -> int:
        return -1 if action.peer is None else self.home.get(action.peer, -1)

    def _before(self, lane: str, stage: int, event: Event) -> Event | None:
        """The last event of a lane that ended by the start of this one."""
        at = bisect_right(self.ends.get((lane, stage), []), event.start) - 1
        while at >= 0 and self.lanes[lane, stage][at] is event:
            at -= 1
        return self.lanes[lane, stage][at] if at >= 0 else None

    def _made(self, payload: str, source: int, event: Event) -> Event | None:
        """The event that brought a result: the message, or its producer if a measured send ends after its use."""
        message = self.sent.get((payload, source, event.action.chunk, event.action.microbatch))
        if message is not None and message.end <= event.start + _CLOSE:
            return message
        return self.computed.get((payload, source, event.action.microbatch))
