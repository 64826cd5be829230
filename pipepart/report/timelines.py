"""Timelines: their file, and their messages from end to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipepart.errors import PlanError
from pipepart.files import Field, load_json
from pipepart.schedule import COMPUTE, Action, Edges, Event, Timeline

__all__ = ["Flow", "flows", "implied_receives", "load_timeline", "pack", "save_timeline"]

VERSION = 1
KINDS = ("F", "B", "I", "W", "SEND", "RECV", "REDUCE")
_PAYLOADS = (None, "F", "B")
_MOST = 100_000
"""The largest number of stages, chunks or micro-batches in a file."""


def pack(timeline: Timeline, digits: int | None = None) -> dict[str, Any]:
    """Return a timeline as plain lists, one per property of its events.

    Times have so many significant digits. None: all.
    """

    def time(seconds: float) -> float:
        return seconds if digits is None else float(f"{seconds:.{digits}g}")

    events = timeline.events
    edges = timeline.edges
    return {
        "stages": timeline.stages,
        "kinds": KINDS,
        "columns": {
            "stage": [e.stage for e in events],
            "kind": [KINDS.index(e.action.kind) for e in events],
            "chunk": [e.action.chunk for e in events],
            "microbatch": [e.action.microbatch for e in events],
            "peer": [-1 if e.action.peer is None else e.action.peer for e in events],
            "payload": [_PAYLOADS.index(e.action.payload) for e in events],
            "start": [time(e.start) for e in events],
            "end": [time(e.end) for e in events],
        },
        "edges": None
        if edges is None
        else {
            "forward": sorted(edges.forward),
            "backward": sorted(edges.backward),
            "tied": [list(group) for group in edges.tied],
        },
        "activation": list(timeline.activation),
        "kept": timeline.kept_for_weight,
    }


def save_timeline(path: str | Path, timeline: Timeline) -> Path:
    """Write a timeline as JSON, exactly."""
    Path(path).write_text(json.dumps({"pipepart": "timeline", "version": VERSION, **pack(timeline)}) + "\n")
    return Path(path)


def load_timeline(path: str | Path) -> Timeline:
    """Read a file of `save_timeline`."""
    if not Path(path).exists():
        raise PlanError(f"there is no timeline at {str(path)!r}. Trace a step, then save_timeline(path, trace).")
    file = load_json(path)
    if (file.entries().get("pipepart"), file.value.get("version")) != ("timeline", VERSION):
        raise PlanError(f"{str(path)!r} is not a timeline of version {VERSION}. Trace the step again.")
    stages = file.at("stages").whole(1, _MOST)
    return Timeline(
        stages,
        _events(file, stages),
        None if file.at("edges").value is None else _edges(file.at("edges")),
        file.at("activation").read(tuple[float, ...]),
        file.at("kept").read(float),
    )


def _events(file: Field, stages: int) -> tuple[Event, ...]:
    """Read the columns of the events, and refuse numbers out of range."""
    kinds = file.at("kinds").read(tuple[str, ...])
    columns: dict[str, tuple[int, ...]] = {}
    count = None
    limits = {"stage": stages, "kind": len(kinds), "chunk": _MOST, "microbatch": _MOST, "payload": len(_PAYLOADS)}
    for name, most in limits.items():
        field = file.at("columns").at(name)
        columns[name] = field.read(tuple[int, ...])
        count = len(columns[name]) if count is None else count
        for index, value in enumerate(columns[name]):
            if value >= most:
                raise field.at(index).refused(f"a number below {most}")
        if len(columns[name]) != count:
            raise field.refused(f"{count} entries, one for each event")
    peers = file.at("columns").at("peer")
    times = [file.at("columns").at(name).read(tuple[float, ...]) for name in ("start", "end")]
    if not isinstance(peers.value, list) or not len(peers.value) == len(times[0]) == len(times[1]) == count:
        raise peers.refused(f"{count} entries in peer, start and end, one for each event")
    unknown = set(kinds) - set(KINDS)
    if unknown or any(end < start for start, end in zip(*times)):
        raise PlanError(f"{file.path}: kinds or times of events are not valid; expected kinds {KINDS} and end >= start")
    other = [None if peer == -1 else peers.at(i).whole(0, _MOST) for i, peer in enumerate(peers.value)]
    return tuple(
        Event(stage, Action(kinds[kind], chunk, k, peer, _PAYLOADS[payload]), start, end)
        for stage, kind, chunk, k, peer, payload, start, end in zip(
            columns["stage"],
            columns["kind"],
            columns["chunk"],
            columns["microbatch"],
            other,
            columns["payload"],
            *times,
        )
    )


def _edges(field: Field) -> Edges:
    forward, backward = (
        frozenset(field.at(name).read(tuple[tuple[int, int], ...])) for name in ("forward", "backward")
    )
    return Edges(forward, backward, field.at("tied").read(tuple[tuple[int, ...], ...]))


@dataclass(frozen=True)
class Flow:
    """One message between two stages. A send or a receive that took no time or was not traced is None."""

    producer: Event
    consumer: Event
    send: Event | None
    receive: Event | None

    @property
    def leaves(self) -> Event:
        """The event at which an arrow begins."""
        return self.send or self.producer

    @property
    def arrives(self) -> Event:
        """The event at which an arrow ends: the receive, or the compute if the message had arrived before it."""
        return self.receive if self.receive is not None and self.receive.duration > 0 else self.consumer

    @property
    def times(self) -> tuple[float, float]:
        """Seconds at which the message left and arrived."""
        left = self.send.start if self.send is not None else self.producer.end
        return left, self.consumer.start if self.arrives is self.consumer else self.arrives.end


def implied_receives(timeline: Timeline) -> list[Event]:
    """Return the receives that a simulated timeline leaves out; they last as long as the message is on its link."""
    if any(event.action.kind == "RECV" for event in timeline.events):
        return []
    home = {event.action.chunk: event.stage for event in timeline.events if event.action.kind in COMPUTE}
    found = []
    for event in timeline.events:
        action = event.action
        if action.kind == "SEND" and action.peer in home:
            receive = Action("RECV", action.peer, action.microbatch, action.chunk, action.payload)
            found.append(Event(home[action.peer], receive, event.start, event.end))
    return found


def flows(timeline: Timeline, receives: Sequence[Event] = ()) -> list[Flow]:
    """Return every message between two stages; `receives` are added to those of the timeline."""
    edges = timeline.edges or Edges.chain(1 + max((e.action.chunk for e in timeline.events), default=0))
    done: dict[tuple[str, int, int], Event] = {}
    sent: dict[tuple[str | None, int, int | None, int], Event] = {}
    received: dict[tuple[str | None, int | None, int, int], Event] = {}
    for event in (*timeline.events, *receives):
        action = event.action
        if action.kind in COMPUTE:
            done["B" if action.kind == "I" else action.kind, action.chunk, action.microbatch] = event
        elif action.kind == "SEND":
            sent[action.payload, action.chunk, action.peer, action.microbatch] = event
        elif action.kind == "RECV":
            received[action.payload, action.peer, action.chunk, action.microbatch] = event
    pairs = [("F", a, b) for a, b in sorted(edges.forward)] + [("B", b, a) for a, b in sorted(edges.backward)]
    found = []
    for payload, source, target in pairs:
        for k in sorted({microbatch for _, _, microbatch in done}):
            producer, consumer = done.get((payload, source, k)), done.get((payload, target, k))
            if producer is None or consumer is None or producer.stage == consumer.stage:
                continue
            message = payload, source, target, k
            found.append(Flow(producer, consumer, sent.get(message), received.get(message)))
    return found
