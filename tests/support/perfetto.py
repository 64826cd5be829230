"""A check of Chrome trace files, as viewers read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check_trace"]


def check_trace(document: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless this is a valid trace: known phases, no negative times, every flow begins, then ends.

    A slice of its process and thread must lie around each end of a flow. Slices of a thread follow each other or lie one
    inside the other; viewers drop slices that cross.
    """
    events: Sequence[Mapping[str, Any]] = document["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    bound: dict[Any, dict[str, Mapping[str, Any]]] = {}
    for number, event in enumerate(events):
        where = f"trace event {number} ({event.get('name')!r})"
        if event.get("ph") not in ("X", "M", "s", "f", "C"):
            raise ValueError(f"{where}: unknown phase {event.get('ph')!r}")
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
            raise ValueError(f"{where}: pid and tid must be numbers")
        if event["ph"] == "M":
            continue
        if not event["ts"] >= 0:
            raise ValueError(f"{where}: starts at {event['ts']}")
        if event["ph"] == "X":
            if not event["dur"] >= 0:
                raise ValueError(f"{where}: lasts {event['dur']}")
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            ends = bound.setdefault(event["id"], {})
            if event["ph"] in ends:
                raise ValueError(f"{where}: flow {event['id']} has two ends of phase {event['ph']!r}")
            ends[event["ph"]] = event
    for (process, thread), mine in slices.items():
        open_ends: list[float] = []
        for start, stop in sorted(mine, key=lambda slice: (slice[0], -slice[1])):
            while open_ends and open_ends[-1] <= start + 1e-2:
                open_ends.pop()
            if open_ends and stop > open_ends[-1] + 1e-2:
                raise ValueError(f"process {process}, thread {thread}: slices cross at {start}")
            open_ends.append(stop)
    for name, ends in bound.items():
        if set(ends) != {"s", "f"}:
            raise ValueError(f"flow {name} does not {'end' if 's' in ends else 'begin'}")
        if ends["f"]["ts"] < ends["s"]["ts"]:
            raise ValueError(f"flow {name} ends before it begins")
        for end in ends.values():
            mine = slices.get((end["pid"], end["tid"]), [])
            if not any(start - 1e-3 <= end["ts"] <= stop + 1e-3 for start, stop in mine):
                raise ValueError(f"flow {name}: no slice around its end at {end['ts']}")
