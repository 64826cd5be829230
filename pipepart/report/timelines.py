"""Timelines: their file, and their messages from end to end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pipepart.errors import PlanError
from pipepart.files import Field, load_json, write_whole
from pipepart.schedule import COMPUTE, Action, Edges, Event, Timeline
from pipepart.values import Range

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
    write_whole(path, json.dumps({"pipepart": "timeline", "version": VERSION, **pack(timeline)}) + "\n")
    return Path(path)


_Number = Annotated[int, Range(0, _MOST - 1)]


@dataclass(frozen=True)
class _Columns:
    """The events of a file: one entry per event in each column."""

    stage: tuple[_Number, ...]
    kind: tuple[_Number, ...]
    chunk: tuple[_Number, ...]
    microbatch: tuple[_Number, ...]
    peer: tuple[Annotated[int, Range(-1, _MOST)], ...]
    """Chunk at the other end of a message; -1: the action has none."""
    payload: tuple[Annotated[int, Range(0, len(_PAYLOADS) - 1)], ...]
    start: tuple[float, ...]
    end: tuple[float, ...]


@dataclass(frozen=True)
class _Edges:
    """The edges in a file."""

    forward: tuple[tuple[_Number, _Number], ...]
    backward: tuple[tuple[_Number, _Number], ...]
    tied: tuple[tuple[_Number, ...], ...]


@dataclass(frozen=True)
class _File:
    """The fields of a file of a timeline."""

    stages: Annotated[int, Range(1, _MOST)]
    kinds: tuple[Literal["F", "B", "I", "W", "SEND", "RECV", "REDUCE"], ...]
    columns: _Columns
    edges: _Edges | None
    activation: tuple[float, ...]
    kept: float


def load_timeline(path: str | Path) -> Timeline:
    """Read a file of `save_timeline`."""
    if not os.path.exists(path):
        raise PlanError(f"there is no timeline at {str(path)!r}. Trace a step, then save_timeline(path, trace).")
    file = load_json(path)
    data = dict(file.entries())
    if (data.pop("pipepart", None), data.pop("version", None)) != ("timeline", VERSION):
        raise PlanError(f"{str(path)!r} is not a timeline of version {VERSION}. Trace the step again.")
    found = replace(file, value=data).read(_File)
    edges = found.edges
    return Timeline(
        found.stages,
        _events(file.at("columns"), found),
        None if edges is None else Edges(frozenset(edges.forward), frozenset(edges.backward), edges.tied),
        found.activation,
        found.kept,
    )


def _events(field: Field, found: _File) -> tuple[Event, ...]:
    """Return the events of the columns of a file, and refuse columns that contradict each other."""
    columns, count = found.columns, len(found.columns.stage)
    for name, entries in vars(columns).items():
        if len(entries) != count:
            raise field.at(name).refused(f"{count} entries, one for each event")
    for name, most in (("stage", found.stages), ("kind", len(found.kinds))):
        for index, value in enumerate(getattr(columns, name)):
            if value >= most:
                raise field.at(name).at(index).refused(f"a number below {most}")
    for index, (start, end) in enumerate(zip(columns.start, columns.end)):
        if end < start:
            raise field.at("end").at(index).refused(f"a time of at least {start}, the start of the event")
    return tuple(
        Event(stage, Action(found.kinds[kind], chunk, k, None if peer == -1 else peer, _PAYLOADS[payload]), start, end)
        for stage, kind, chunk, k, peer, payload, start, end in zip(*vars(columns).values())
    )


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
