"""Measured timelines: marks that are set while a step runs, and their events on one common clock."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipepart.devices import Stopwatch
from pipepart.errors import PipelineError
from pipepart.runtime.mesh import Groups
from pipepart.runtime.rendezvous import job_store
from pipepart.runtime.transport import GroupTransport, Transport
from pipepart.schedule import Action, Event, Timeline

__all__ = ["Trace", "TraceBoard", "TracePolicy", "clock_offset"]

_KINDS = ("F", "B", "I", "W", "SEND", "RECV", "REDUCE")
_PAYLOADS = (None, "F", "B")
_COLUMNS = 8  # of an event as numbers
_ROUNDS = 8  # round trips to stage 0; the fastest one gives the difference of the clocks


class TracePolicy:
    """Selects the training steps that are traced: by their numbers, and by requests of callbacks."""

    def __init__(self) -> None:
        self.numbers: frozenset[int] = frozenset()
        """Numbers of steps that are traced."""
        self.last: int | None = None
        """The number of the last step that was to be traced."""
        self._asked: dict[object, Callable[[], bool]] = {}

    def due(self, number: int) -> bool:
        """Return whether the step with this number is traced. The answer must be the same on every rank."""
        found = number in self.numbers or any(due() for due in list(self._asked.values()))
        self.last = number if found else self.last
        return found

    def also(self, due: Callable[[], bool]) -> Callable[[], None]:
        """Trace also the steps before which `due()` is true. Returns a function that ends this."""
        key = object()
        self._asked[key] = due

        def end() -> None:
            self._asked.pop(key, None)

        return end


class Trace:
    """The marks of one stage in one step. The cost is one list append for each action."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage, self._watch = stage, Stopwatch(device)
        self._marks: list[tuple[Action, Any, Any]] = []

    def now(self) -> Any:
        """Return a mark for the beginning of an action."""
        return self._watch.mark()

    def add(self, action: Action, started: Any) -> None:
        """Add an action that began at the mark `started` and ends now."""
        self._marks.append((action, started, self._watch.mark()))

    def events(self, offset: float = 0.0) -> list[Event]:
        """Return the events on the clock of this process, shifted by `offset` seconds."""
        seconds = self._watch.seconds
        for _, _, last in self._marks[-1:]:
            seconds(last)  # the host waits once, for the last mark
        return [Event(self._stage, action, seconds(a) + offset, seconds(b) + offset) for action, a, b in self._marks]


class TraceBoard:
    """The events of traced steps of all stages of a replica.

    A stage writes its events into the store of the job, which takes microseconds. No rank waits until a timeline is
    read, and any rank can read one alone.
    """

    _numbers = itertools.count()

    def __init__(self, stages: int, groups: Groups | None, timeout: float, one_clock: bool = True) -> None:
        """`one_clock`: all stages of the replica run on one host, whose processes share the monotonic clock."""
        self._stages, self._groups, self._timeout = stages, groups, timeout
        self._name = f"pipepart/trace/{next(TraceBoard._numbers)}"  # ranks make their boards in the same order
        self._offset: float | None = 0.0 if one_clock or groups is None else None
        self._steps = 0
        self._own: list[Event] = []
        self._timeline: Timeline | None = None

    def post(self, trace: Trace) -> None:
        """Publish the events of this stage in one more traced step. All stages of the replica must call it."""
        if self._offset is None and self._groups is not None:
            self._offset = clock_offset(self._groups)
        self._steps, self._timeline = self._steps + 1, None
        self._own = trace.events(self._offset or 0.0)
        if self._groups is not None and self._stages > 1:
            numbers = itertools.chain((self._steps,), *map(_row, self._own))
            packed = struct.pack(f"<{1 + _COLUMNS * len(self._own)}d", *numbers)
            job_store().set(self._key(self._groups.stage), packed)  # type: ignore[arg-type]

    def timeline(self) -> Timeline | None:
        """Return the events of all stages in the last traced step, or None if no step was traced."""
        if self._timeline is None and self._steps:
            events = list(self._own)
            for stage in range(self._stages):
                if self._groups is not None and stage != self._groups.stage:
                    events += self._read(stage)
            self._timeline = Timeline.from_events(self._stages, events)
        return self._timeline

    def _key(self, stage: int) -> str:
        # Two keys in turn: a stage may be one step ahead of another, which still reads the events of the step before.
        replica = self._groups.replica if self._groups is not None else 0
        return f"{self._name}/{replica}/{stage}/{self._steps % 2}"

    def _read(self, stage: int) -> list[Event]:
        until = time.monotonic() + self._timeout
        store = job_store()
        while time.monotonic() < until:
            if store.check([self._key(stage)]):
                step, *numbers = struct.iter_unpack("<d", store.get(self._key(stage)))
                if step[0] == self._steps:
                    flat = [number for (number,) in numbers]
                    return [_event(flat[i : i + _COLUMNS]) for i in range(0, len(flat), _COLUMNS)]
            time.sleep(0.001)
        raise PipelineError(
            f"stage {stage} has not published its events of the traced step within {self._timeout:.0f} s: it has ended, is "
            "stuck, or did not trace the step. Trace the same steps on every rank."
        )


def _row(event: Event) -> tuple[float, ...]:
    """Return an event as numbers; pickling the events of a step would take longer than tracing it."""
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
    """Return the seconds to add to the clock of this process to get that of stage 0. All stages must call it.

    Stage 0 answers each question with its time, which lies between question and answer. So the error is at most half of
    the shortest round trip.
    """
    transport = GroupTransport(groups)  # CPU tensors, which go over gloo in CUDA jobs, too
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
