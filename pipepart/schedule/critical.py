"""The critical path of a timeline: which events made the step as long as it is."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from pipepart.schedule.actions import COMPUTE, Edges

if TYPE_CHECKING:
    from pipepart.schedule.timeline import Event, Timeline

__all__ = ["critical_path"]


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """From the event that ends last, back through whatever ended last of all that each event had to wait for.

    What an event waits for: the event before it on its stage (compute) or on its link (SEND), the producer of what is
    sent, the messages that arrive, and the results made on the same stage. Works alike for measured events, where a
    gap between one event and the next is overhead that no event explains.
    """
    if not timeline.events:
        return ()
    edges = timeline.edges or Edges.chain(1 + max(event.action.chunk for event in timeline.events))
    computed: dict[tuple[str, int, int], Event] = {}
    sent: dict[tuple[str, int, int, int], Event] = {}
    lanes: dict[tuple[str, int], list[Event]] = {}
    home = {event.action.chunk: event.stage for event in timeline.events if event.action.kind in COMPUTE}
    for event in timeline.events:
        action = event.action
        if action.kind in COMPUTE:
            computed["B" if action.kind == "I" else action.kind, action.chunk, action.microbatch] = event
            lanes.setdefault(("compute", event.stage), []).append(event)
        elif action.kind == "SEND":
            assert action.payload is not None
            assert action.peer is not None
            sent[action.payload, action.chunk, action.peer, action.microbatch] = event
            lanes.setdefault(("out", event.stage), []).append(event)
            lanes.setdefault(("in", home.get(action.peer, -1)), []).append(event)
        elif action.kind == "REDUCE":
            lanes.setdefault(("reduce", event.stage), []).append(event)
    for lane in lanes.values():
        lane.sort(key=lambda event: event.end)
    ends = {key: [event.end for event in lane] for key, lane in lanes.items()}
    sources: dict[int, list[int]] = {}
    targets: dict[int, list[int]] = {}
    for source, target in edges.forward:
        sources.setdefault(target, []).append(source)
    for source, target in edges.backward:
        targets.setdefault(source, []).append(target)

    def before(key: tuple[str, int], event: Event) -> Event | None:
        """The last event of a lane that ended by the start of this one."""
        at = bisect_right(ends.get(key, []), event.start) - 1
        while at >= 0 and lanes[key][at] is event:
            at -= 1
        return lanes[key][at] if at >= 0 else None

    def produced(payload: str, source: int, target: int, k: int, event: Event) -> Event | None:
        """What brought a result here. A measured send may end after its message was used: then who made it."""
        message = sent.get((payload, source, target, k))
        if message is not None and message.end <= event.start + 1e-12:
            return message
        return computed.get((payload, source, k))

    def waited_for(event: Event) -> list[Event | None]:
        action = event.action
        chunk, k = action.chunk, action.microbatch
        if action.kind == "SEND":
            made = computed.get((action.payload or "F", chunk, k))
            receiver = home.get(-1 if action.peer is None else action.peer, -1)
            return [made, before(("out", event.stage), event), before(("in", receiver), event)]
        if action.kind == "REDUCE":
            own = [before(("compute", event.stage), event), before(("reduce", event.stage), event)]
            if any(e is not None and e.end >= event.start - 1e-12 for e in own):
                return own
            return own + [before(("compute", stage), event) for stage in range(timeline.stages)]
        same = before(("compute", event.stage), event)
        if action.kind == "F":
            return [same, *(produced("F", source, chunk, k, event) for source in sources.get(chunk, ()))]
        if action.kind == "W":
            return [same, computed.get(("B", chunk, k))]
        return [
            same,
            computed.get(("F", chunk, k)),
            *(produced("B", t, chunk, k, event) for t in targets.get(chunk, ())),
        ]

    event = max(timeline.events, key=lambda e: (e.end, e.start))
    path, seen = [event], {id(event)}
    while True:
        earlier = [e for e in waited_for(event) if e is not None and id(e) not in seen and e.end <= event.start + 1e-12]
        if not earlier:
            return tuple(reversed(path))
        event = max(earlier, key=lambda e: e.end)
        path.append(event)
        seen.add(id(event))
