"""Timelines in files: what a traced step leaves in its run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipepart.errors import PlanError
from pipepart.schedule import Action, Edges, Event, Timeline

__all__ = ["load_timeline", "pack", "save_timeline", "unpack"]

VERSION = 1
KINDS = ("F", "B", "I", "W", "SEND", "RECV", "REDUCE")
_PAYLOADS = (None, "F", "B")


def pack(timeline: Timeline, digits: int | None = None) -> dict[str, Any]:
    """A timeline as plain lists, one per property of its events; times with so many significant digits, or all."""

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


def unpack(data: dict[str, Any]) -> Timeline:
    """The timeline that `pack` has packed."""
    columns, kinds, edges = data["columns"], data["kinds"], data["edges"]
    names = ("stage", "kind", "chunk", "microbatch", "peer", "payload", "start", "end")
    events = tuple(
        Event(stage, Action(kinds[kind], chunk, k, None if peer < 0 else peer, _PAYLOADS[payload]), start, end)
        for stage, kind, chunk, k, peer, payload, start, end in zip(*(columns[name] for name in names), strict=True)
    )
    joined = edges and Edges(
        frozenset(map(tuple, edges["forward"])),
        frozenset(map(tuple, edges["backward"])),
        tuple(map(tuple, edges["tied"])),
    )
    return Timeline(data["stages"], events, joined, tuple(data["activation"]), data["kept"])


def save_timeline(path: str | Path, timeline: Timeline) -> Path:
    """Write a timeline as JSON, exactly."""
    Path(path).write_text(json.dumps({"pipepart": "timeline", "version": VERSION, **pack(timeline)}) + "\n")
    return Path(path)


def load_timeline(path: str | Path) -> Timeline:
    """Read a file of `save_timeline`."""
    try:
        data = json.loads(Path(path).read_text())
        if data["pipepart"] != "timeline" or data["version"] != VERSION:
            raise KeyError("version")
        return unpack(data)
    except FileNotFoundError as error:
        raise PlanError(
            f"there is no timeline at {str(path)!r}. Trace a step, then save_timeline(path, trace)."
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PlanError(
            f"{str(path)!r} is not a timeline of version {VERSION} ({error!r}). Trace the step again."
        ) from error
