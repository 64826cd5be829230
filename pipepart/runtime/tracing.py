"""What the actions of a step took: marks set while it runs, turned into events on one common clock afterwards."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipepart.errors import PipelineError
from pipepart.runtime.device import Stopwatch
from pipepart.runtime.mesh import Groups
from pipepart.runtime.transport import GroupTransport, Transport
from pipepart.schedule import Action, Event, Timeline

__all__ = ["Trace", "TraceBoard", "TracePolicy", "clock_offset"]

_KINDS = ("F", "B", "I", "W", "SEND", "RECV", "REDUCE")
_PAYLOADS = (None, "F", "B")
_COLUMNS = 8  # of an event as numbers
_ROUNDS = 8  # round trips to a stage on another host; the fastest one tells the clocks apart best


class TracePolicy:
    """The training steps that are traced: those of some numbers, and those that somebody who watches asks for."""

    def __init__(self) -> None:
        self.numbers: frozenset[int] = frozenset()
        self._asked: dict[object, Callable[[], bool]] = {}

    def due(self, number: int) -> bool:
        """Whether the step with this number is traced. Every rank must come to the same answer."""
        return number in self.numbers or any(due() for due in list(self._asked.values()))

    def also(self, due: Callable[[], bool]) -> Callable[[], None]:
        """Trace the steps, too, before which `due` is true; returns how to end that."""
        key = object()
        self._asked[key] = due

        def end() -> None:
            self._asked.pop(key, None)

        return end


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


class TraceBoard:
    """Where the stages of a replica leave the events of traced steps, for whoever wants to see them.

    A stage writes its own events into the store of the job, which takes microseconds; nobody waits for anybody until
    a timeline is read, and any rank can read one by itself.
    """

    _numbers = itertools.count()

    def __init__(self, stages: int, groups: Groups | None, timeout: float) -> None:
        self._stages, self._groups, self._timeout = stages, groups, timeout
        self._name = f"pipepart/trace/{next(TraceBoard._numbers)}"  # ranks make their boards in the same order
        self._steps = 0
        self._own: list[Event] = []
        self._timeline: Timeline | None = None

    def post(self, trace: Trace, offset: float = 0.0) -> None:
        """This stage's events of one more traced step, on the clock of stage 0."""
        self._steps, self._timeline = self._steps + 1, None
        self._own = trace.events(offset)
        if self._groups is not None and self._stages > 1:
            numbers = itertools.chain((self._steps,), *map(_row, self._own))
            packed = struct.pack(f"<{1 + _COLUMNS * len(self._own)}d", *numbers)
            _store().set(self._key(self._groups.stage), packed)  # type: ignore[arg-type]

    def timeline(self) -> Timeline | None:
        """All stages' events of the last traced step; None if there was none."""
        if self._timeline is None and self._steps:
            events = list(self._own)
            for stage in range(self._stages):
                if self._groups is not None and stage != self._groups.stage:
                    events += self._read(stage)
            self._timeline = Timeline.from_events(self._stages, events)
        return self._timeline

    def _key(self, stage: int) -> str:
        # A stage can be one step ahead of another, so what it writes then must not cover what is still to be read.
        replica = self._groups.replica if self._groups is not None else 0
        return f"{self._name}/{replica}/{stage}/{self._steps % 2}"

    def _read(self, stage: int) -> list[Event]:
        until = time.monotonic() + self._timeout
        store = _store()
        while time.monotonic() < until:
            if store.check([self._key(stage)]):
                step, *numbers = struct.iter_unpack("<d", store.get(self._key(stage)))
                if step[0] == self._steps:
                    flat = [number for (number,) in numbers]
                    return [_event(flat[i : i + _COLUMNS]) for i in range(0, len(flat), _COLUMNS)]
            time.sleep(0.001)
        raise PipelineError(f"stage {stage} has not left its events of the traced step within {self._timeout:.0f} s")


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


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
