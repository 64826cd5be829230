"""Timelines as Chrome trace events, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipepart.files import write_whole
from pipepart.report.timelines import flows, implied_receives
from pipepart.schedule import Event, Timeline

__all__ = ["write_perfetto"]

_LANES = ("compute", "send", "receive", "reduce")
_LANE = {"SEND": "send", "RECV": "receive", "REDUCE": "reduce"}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "REDUCE": "reduce"}


def write_perfetto(
    path: str | Path, timeline: Timeline, *, measured: Timeline | None = None, title: str = "pipepart"
) -> Path:
    """Write a trace file: a process per stage, a slice per action, a flow per message, a counter for live activations.

    A flow leads from a send to its receive. Messages that overlap are in different threads, since slices must not cross.
    With `measured` both timelines are in the file, as different processes.
    """
    events = _trace_events(timeline, label="predicted" if measured is not None else "")
    if measured is not None:
        measured = measured if measured.edges is not None else replace(measured, edges=timeline.edges)
        events += _trace_events(measured, label="measured", first_process=timeline.stages, first_flow=len(events))
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
    write_whole(path, json.dumps(document) + "\n")
    return Path(path)


def _trace_events(
    timeline: Timeline, *, label: str = "", first_process: int = 0, first_flow: int = 0
) -> list[dict[str, Any]]:
    """Return the trace events of one timeline; times are in microseconds."""
    found: list[dict[str, Any]] = []
    received = implied_receives(timeline)
    events = [*timeline.events, *received]
    threads = _threads(events)
    for stage in range(timeline.stages):
        own = sorted({threads[event] for event in events if event.stage == stage})
        found += _names(first_process + stage, f"{label} stage {stage}".strip(), own)
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
        if there < left:  # the clocks of hosts differ: such a message has no arrow
            continue
        for phase, event, time in (("s", flow.leaves, left), ("f", flow.arrives, there)):
            if time == event.end:  # an arrow binds to the slice around its end
                time = max(event.start, left if phase == "f" else 0.0, event.end - 0.01 * event.duration)
            where = {"pid": first_process + event.stage, "tid": threads[event], "ts": time * 1e6}
            more = {"bp": "e"} if phase == "f" else {}
            found.append({"ph": phase, "cat": "message", "name": "message", "id": number, **more, **where})
        number += 1
    for stage, curve in enumerate(timeline.memory):
        counter = {"ph": "C", "name": "live activations", "pid": first_process + stage, "tid": 0}
        found += [{**counter, "ts": time * 1e6, "args": {"live": level}} for time, level in curve]
    return found


def _names(process: int, name: str, threads: Sequence[int]) -> list[dict[str, Any]]:
    """Return the events that name a process and its threads."""
    found = [_meta("process_name", process, {"name": name})]
    found.append(_meta("process_sort_index", process, {"sort_index": process}))
    for thread in threads:
        lane, number = _LANES[thread % 10], thread // 10
        found.append(_meta("thread_name", process, {"name": f"{lane} {number + 1}" if number else lane}, thread))
        found.append(_meta("thread_sort_index", process, {"sort_index": 100 * (thread % 10) + number}, thread))
    return found


def _meta(name: str, process: int, arguments: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _threads(events: Sequence[Event]) -> dict[Event, int]:
    """Return a thread for each event: the first of its lane in which it crosses no other event."""
    free: dict[tuple[int, str], list[float]] = {}
    found: dict[Event, int] = {}
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        lane = _LANE.get(event.action.kind, "compute")
        ends = free.setdefault((event.stage, lane), [])
        number = next((n for n, end in enumerate(ends) if end <= event.start + 1e-9), len(ends))
        ends[number : number + 1] = [event.end]
        found[event] = _LANES.index(lane) + 10 * number
    return found
