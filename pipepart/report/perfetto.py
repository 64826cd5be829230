"""Timelines as Chrome trace events: for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipepart.errors import PlanError
from pipepart.report.message_paths import flows, implied_receives
from pipepart.schedule import Event, Timeline

__all__ = ["check_trace", "trace_events", "write_perfetto"]

_LANES = ("compute", "send", "receive", "reduce")
_LANE = {"SEND": "send", "RECV": "receive", "REDUCE": "reduce"}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "REDUCE": "reduce"}


def write_perfetto(
    path: str | Path, timeline: Timeline, *, measured: Timeline | None = None, title: str = "pipepart"
) -> Path:
    """Write a trace file: a process per stage, a slice per action, a flow per message, a counter for live activations.

    A flow leads from a send to its receive; messages that overlap lie in threads of their own, as slices must not cross.
    With `measured` both timelines are in the file, as processes of their own.
    """
    events = trace_events(timeline, label="predicted" if measured is not None else "")
    if measured is not None:
        measured = measured if measured.edges is not None else replace(measured, edges=timeline.edges)
        events += trace_events(measured, label="measured", first_process=timeline.stages, first_flow=len(events))
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
    Path(path).write_text(json.dumps(document) + "\n")
    return Path(path)


def trace_events(
    timeline: Timeline, *, label: str = "", first_process: int = 0, first_flow: int = 0
) -> list[dict[str, Any]]:
    """The trace events of one timeline; times in microseconds."""
    found: list[dict[str, Any]] = []
    received = implied_receives(timeline)
    events = [*timeline.events, *received]
    threads = _threads(events)
    for stage in range(timeline.stages):
        process = first_process + stage
        name = f"{label} stage {stage}".strip()
        found.append(_meta("process_name", process, {"name": name}))
        found.append(_meta("process_sort_index", process, {"sort_index": process}))
        for thread in sorted({threads[event] for event in events if event.stage == stage}):
            lane, number = _LANES[thread % 10], thread // 10
            found.append(_meta("thread_name", process, {"name": f"{lane} {number + 1}" if number else lane}, thread))
            found.append(_meta("thread_sort_index", process, {"sort_index": 100 * (thread % 10) + number}, thread))
    for event in events:
        action = event.action
        arguments = {"chunk": action.chunk, "micro-batch": action.microbatch, "action": str(action)}
        if action.peer is not None:
            arguments["peer"] = action.peer
        found.append(
            {
                "ph": "X",
                "name": str(action),
                "cat": _NAMES.get(action.kind, action.kind.lower()),
                "pid": first_process + event.stage,
                "tid": threads[event],
                "ts": event.start * 1e6,
                "dur": max(0.0, event.end - event.start) * 1e6,
                "args": arguments,
            }
        )
    number = first_flow
    for flow in flows(timeline, received):
        left, there = flow.times
        if there < left:  # clocks of different hosts may disagree: such a message has no arrow
            continue
        for phase, event, time in (("s", flow.leaves, left), ("f", flow.arrives, there)):
            if time == event.end:  # an arrow binds to the slice around its end
                time = max(event.start, left if phase == "f" else 0.0, event.end - 0.01 * event.duration)
            where = {"pid": first_process + event.stage, "tid": threads[event], "ts": time * 1e6}
            more = {"bp": "e"} if phase == "f" else {}
            found.append({"ph": phase, "cat": "message", "name": "message", "id": number, **more, **where})
        number += 1
    for stage, curve in enumerate(timeline.memory):
        for time, level in curve:
            name = "live activations"
            found.append(
                {
                    "ph": "C",
                    "name": name,
                    "pid": first_process + stage,
                    "tid": 0,
                    "ts": time * 1e6,
                    "args": {"live": level},
                }
            )
    return found


def _meta(name: str, process: int, arguments: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _lane(event: Event) -> str:
    return _LANE.get(event.action.kind, "compute")


def _threads(events: Sequence[Event]) -> dict[Event, int]:
    """A thread for each event: that of its lane, or the next of that lane in which it crosses no other event."""
    free: dict[tuple[int, str], list[float]] = {}
    found: dict[Event, int] = {}
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        lane = _lane(event)
        ends = free.setdefault((event.stage, lane), [])
        number = next((n for n, end in enumerate(ends) if end <= event.start + 1e-9), len(ends))
        ends[number : number + 1] = [event.end]
        found[event] = _LANES.index(lane) + 10 * number
    return found


def check_trace(document: Mapping[str, Any]) -> None:
    """Raise `PlanError` unless this is a sound trace: known phases, no negative times, every flow begins, then ends.

    Flows must also bind: a slice of their process and thread lies around each of their ends. Slices of a thread follow
    each other or lie one inside the other; viewers drop what crosses.
    """
    events: Sequence[Mapping[str, Any]] = document["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    bound: dict[Any, dict[str, Mapping[str, Any]]] = {}
    for number, event in enumerate(events):
        where = f"trace event {number} ({event.get('name')!r})"
        if event.get("ph") not in ("X", "M", "s", "f", "C"):
            raise PlanError(f"{where}: unknown phase {event.get('ph')!r}")
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
            raise PlanError(f"{where}: pid and tid must be numbers")
        if event["ph"] == "M":
            continue
        if not event["ts"] >= 0:
            raise PlanError(f"{where}: starts at {event['ts']}")
        if event["ph"] == "X":
            if not event["dur"] >= 0:
                raise PlanError(f"{where}: lasts {event['dur']}")
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            ends = bound.setdefault(event["id"], {})
            if event["ph"] in ends:
                raise PlanError(f"{where}: flow {event['id']} has two ends of phase {event['ph']!r}")
            ends[event["ph"]] = event
    for (process, thread), mine in slices.items():
        open_ends: list[float] = []
        for start, stop in sorted(mine, key=lambda slice: (slice[0], -slice[1])):
            while open_ends and open_ends[-1] <= start + 1e-2:
                open_ends.pop()
            if open_ends and stop > open_ends[-1] + 1e-2:
                raise PlanError(f"process {process}, thread {thread}: slices cross at {start}")
            open_ends.append(stop)
    for name, ends in bound.items():
        if set(ends) != {"s", "f"}:
            raise PlanError(f"flow {name} does not {'end' if 's' in ends else 'begin'}")
        if ends["f"]["ts"] < ends["s"]["ts"]:
            raise PlanError(f"flow {name} ends before it begins")
        for end in ends.values():
            mine = slices.get((end["pid"], end["tid"]), [])
            if not any(start - 1e-3 <= end["ts"] <= stop + 1e-3 for start, stop in mine):
                raise PlanError(f"flow {name}: no slice around its end at {end['ts']}")
