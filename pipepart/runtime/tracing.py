"""What the actions of a step took: marks set while it runs, turned into events on one common clock afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipepart.runtime.device import Stopwatch
from pipepart.runtime.mesh import Groups
from pipepart.runtime.transport import GroupTransport, Transport
from pipepart.schedule import Action, Event, Timeline

__all__ = ["Trace", "clock_offset", "gather_timeline"]

_KINDS = ("F", "B", "I", "W", "SEND", "RECV", "REDUCE")
_PAYLOADS = (None, "F", "B")
_COLUMNS = 8  # of an event as numbers
_ROUNDS = 8  # round trips to a stage on another host; the fastest one tells the clocks apart best


class Trace:
    """The marks of one stage in one step. It costs a list append for each action."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage, self._watch = stage, Stopwatch(device)
        self._marks: list[tuple[Action, Any, Any]] = []

    def now(self) -> Any:
        return self._watch.mark()

    def add(self, action: Action, started: Any) -> None:
        """An action that began at `started` has just ended."""
        self._marks.append((action, started, self._watch.mark()))

    def events(self, offset: float = 0.0) -> list[Event]:
        """The events by this process's clock, shifted by `offset`."""
        seconds = self._watch.seconds
        return [Event(self._stage, action, seconds(a) + offset, seconds(b) + offset) for action, a, b in self._marks]


def gather_timeline(trace: Trace, stages: int, groups: Groups | None, offset: float = 0.0) -> Timeline:
    """All stages' events of the step on the clock of stage 0. Every stage of the replica must call it."""
    events = trace.events(offset)
    if groups is not None and stages > 1:
        own = torch.tensor([_row(event) for event in events], dtype=torch.float64).reshape(-1, _COLUMNS)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(stages)]
        dist.all_gather(counts, torch.tensor([len(own)]), group=groups.pipeline)
        padded = torch.zeros(max(int(count) for count in counts), _COLUMNS, dtype=torch.float64)
        padded[: len(own)] = own
        tables = [torch.empty_like(padded) for _ in range(stages)]
        dist.all_gather(tables, padded, group=groups.pipeline)
        events = [_event(row) for table, count in zip(tables, counts) for row in table[: int(count)].tolist()]
    return Timeline.from_events(stages, events)


def _row(event: Event) -> tuple[float, ...]:
    """An event as numbers: pickled, the events of a step would take longer than the tracing."""
    action = event.action
    peer, payload = -1 if action.peer is None else action.peer, _PAYLOADS.index(action.payload)
    return (
        event.stage, _KINDS.index(action.kind), action.chunk, action.microbatch, peer, payload, event.start, event.end
    )  # fmt: skip


def _event(row: Sequence[float]) -> Event:
    stage, kind, chunk, microbatch, peer, payload = (int(value) for value in row[:6])
    action = Action(_KINDS[kind], chunk, microbatch, None if peer < 0 else peer, _PAYLOADS[payload])
    return Event(stage, action, row[6], row[7])


def clock_offset(groups: Groups, clock: Callable[[], float] = time.perf_counter) -> float:
    """What must be added to this process's clock to get that of stage 0. Every stage of the replica must call it.

    Stage 0 answers each question with its time. The answer was given between question and return, so the error is half
    of the shortest round trip at most.
    """
    transport = GroupTransport(groups)  # tensors on the CPU: the groups speak gloo for these, also between GPUs
    if groups.stage == 0:
        for stage in range(1, groups.mesh.stages):
            for _ in range(_ROUNDS):
                _receive(transport, stage)
                transport.send(torch.tensor([clock()], dtype=torch.float64), stage).wait()
        return 0.0
    found: list[tuple[float, float]] = []
    for _ in range(_ROUNDS):
        asked = clock()
        transport.send(torch.zeros(1, dtype=torch.float64), 0).wait()
        there = _receive(transport, 0)
        back = clock()
        found.append((back - asked, there - (asked + back) / 2))
    return min(found)[1]


def _receive(transport: Transport, source: int) -> float:
    buffer = torch.empty(1, dtype=torch.float64)
    transport.recv(buffer, source).wait()
    return float(buffer)
