"""Timelines as Chrome trace events: for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipepart.errors import PlanError
from pipepart.schedule import COMPUTE, Edges, Event, Timeline

__all__ = ["check_trace", "trace_events", "write_perfetto"]

_THREADS = {"compute": 0, "send": 1, "receive": 2, "reduce": 3}
_LANE = {"SEND": "send", "RECV": "receive", "REDUCE": "reduce"}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "REDUCE": "reduce"}


def write_perfetto(
    path: str | Path, timeline: Timeline, *, measured: Timeline | None = None, title: str = "pipepart"
) -> Path:
    """Write a trace file: a process per stage, a slice per action, a flow per message, a counter for live activations.

    With `measured` both timelines are in the file, as processes of their own.
    """
    events = trace_events(timeline, label="predicted" if measured is not None else "")
    if measured is not None:
        events += trace_events(measured, label="measured", first_process=timeline.stages, first_flow=len(events))
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
    Path(path).write_text(json.dumps(document) + "\n")
    return Path(path)


def trace_events(
    timeline: Timeline, *, label: str = "", first_process: int = 0, first_flow: int = 0
) -> list[dict[str, Any]]:
    """The trace events of one timeline; times in microseconds."""
    found: list[dict[str, Any]] = []
    for stage in range(timeline.stages):
        process = first_process + stage
        name = f"{label} stage {stage}".strip()
        found.append(_meta("process_name", process, {"name": name}))
        found.append(_meta("process_sort_index", process, {"sort_index": process}))
        lanes = {_lane(event) for event in timeline.events if event.stage == stage}
        for lane in sorted(lanes, key=_THREADS.__getitem__):
            found.append(_meta("thread_name", process, {"name": lane}, _THREADS[lane]))
    for event in timeline.events:
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
                "tid": _THREADS[_lane(event)],
                "ts": event.start * 1e6,
                "dur": max(0.0, event.end - event.start) * 1e6,
                "args": arguments,
            }
        )
    for number, (source, target) in enumerate(_flows(timeline)):
        common = {"cat": "message", "name": "message", "id": first_flow + number}
        found.append({"ph": "s", **common, **_end_of(source, first_process, source.end - 0.01 * source.duration)})
        found.append({"ph": "f", "bp": "e", **common, **_end_of(target, first_process, target.start)})
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


def _end_of(event: Event, first_process: int, time: float) -> dict[str, Any]:
    return {"pid": first_process + event.stage, "tid": _THREADS[_lane(event)], "ts": time * 1e6}


def _flows(timeline: Timeline) -> list[tuple[Event, Event]]:
    """Every (producer, consumer) of a message between two stages."""
    edges = timeline.edges or Edges.chain(1 + max((e.action.chunk for e in timeline.events), default=0))
    done: dict[tuple[str, int, int], Event] = {}
    for event in timeline.events:
        if event.action.kind in COMPUTE:
            kind = "B" if event.action.kind == "I" else event.action.kind
            done[kind, event.action.chunk, event.action.microbatch] = event
    pairs = [("F", a, b) for a, b in sorted(edges.forward)] + [("B", b, a) for a, b in sorted(edges.backward)]
    microbatches = sorted({microbatch for _, _, microbatch in done})
    found = []
    for payload, producer, consumer in pairs:
        for microbatch in microbatches:
            source, target = done.get((payload, producer, microbatch)), done.get((payload, consumer, microbatch))
            if source is None or target is None or source.stage == target.stage:
                continue
            if target.start >= source.end:  # clocks of different hosts may disagree: such a message has no arrow
                found.append((source, target))
    return found


def check_trace(document: Mapping[str, Any]) -> None:
    """Raise `PlanError` unless this is a sound trace: known phases, no negative times, every flow begins, then ends.

    Flows must also bind: a slice of their process and thread lies around each of their ends.
    """
    events: Sequence[Mapping[str, Any]] = document["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    flows: dict[Any, dict[str, Mapping[str, Any]]] = {}
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
            ends = flows.setdefault(event["id"], {})
            if event["ph"] in ends:
                raise PlanError(f"{where}: flow {event['id']} has two ends of phase {event['ph']!r}")
            ends[event["ph"]] = event
    for name, ends in flows.items():
        if set(ends) != {"s", "f"}:
            raise PlanError(f"flow {name} does not {'end' if 's' in ends else 'begin'}")
        if ends["f"]["ts"] < ends["s"]["ts"]:
            raise PlanError(f"flow {name} ends before it begins")
        for end in ends.values():
            mine = slices.get((end["pid"], end["tid"]), [])
            if not any(start - 1e-3 <= end["ts"] <= stop + 1e-3 for start, stop in mine):
                raise PlanError(f"flow {name}: no slice around its end at {end['ts']}")
