"""Messages of a timeline from end to end: which compute made them, their send, their receive, and who used them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipepart.schedule import COMPUTE, Action, Edges, Event, Timeline

__all__ = ["Flow", "flows", "implied_receives"]


@dataclass(frozen=True)
class Flow:
    """One message between two stages. A send or receive that took no time, or was not traced, is None."""

    producer: Event
    consumer: Event
    send: Event | None
    receive: Event | None

    @property
    def leaves(self) -> Event:
        """Where an arrow begins."""
        return self.send or self.producer

    @property
    def arrives(self) -> Event:
        """Where an arrow ends: at the compute that used it, if it was there already when it was asked for."""
        return self.receive if self.receive is not None and self.receive.duration > 0 else self.consumer

    @property
    def times(self) -> tuple[float, float]:
        """When it left and when it was there."""
        left = self.send.start if self.send is not None else self.producer.end
        return left, self.consumer.start if self.arrives is self.consumer else self.arrives.end


def implied_receives(timeline: Timeline) -> list[Event]:
    """Receives that a simulated timeline does not spell out: a message comes in while it is on its link."""
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
    """Every message between two stages; `receives` adds to those of the timeline."""
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
