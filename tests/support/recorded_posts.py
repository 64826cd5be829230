"""The posts and waits of the real executor on all stages, as programs for `channel_rules`.

The stages run in threads of one process, and their transfers are matched in memory, so a recording never hangs. A recording
has the set-up of the communicators and two steps: one with forms that no receiver knows, and one with known forms.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
from torch import nn

from pipepart.recording import Chunk, Recording, op_of, record, split
from pipepart.runtime import executor, mailbox
from pipepart.runtime.executor import Executor, PreparedBatch, StageChunks, StepWork
from pipepart.runtime.mailbox import Routes
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.schedule import COMPUTE, Action, Message, Schedule, make_schedule, messages_of
from pipepart.schedule.channel_programs import receives_due, set_up_posts
from pipepart.schedule.channel_rules import Compute, Control, Entry, Order, Post, Sync

__all__ = ["Case", "Recorded", "grid", "record_posts", "with_host_waits"]

_PATIENCE = 30.0  # seconds until a receive that nobody answers is an error of the executor


@dataclass(frozen=True)
class Case:
    """A schedule, and the steps that are recorded with it."""

    schedule: str
    stages: int
    microbatches: int
    skips: bool = False
    uneven: bool = False
    training: bool = True
    options: tuple[tuple[str, int], ...] = ()
    """Further arguments of `make_schedule`: chunks, slack."""

    def __str__(self) -> str:
        words = [self.schedule, *(f"{name}={value}" for name, value in self.options), f"{self.stages} stages"]
        marks = {"skips": self.skips, "uneven": self.uneven, "evaluation": not self.training}
        return ", ".join([*words, f"{self.microbatches} micro-batches", *(name for name, on in marks.items() if on)])

    def make_schedule(self) -> Schedule:
        """Return the schedule of training, or that of evaluation over the same chunks."""
        sizes: dict[str, Any] = {"stages": self.stages, "microbatches": self.microbatches}
        found = make_schedule(self.schedule, **sizes, **dict(self.options))
        return found if self.training else make_schedule("forward", **sizes, placement=found.placement)


def grid(stages: Sequence[int] = (2, 3, 4, 8)) -> Iterator[Case]:
    """Every schedule at these numbers of stages, with and without skips, uneven micro-batches and backward."""
    for count in stages:
        kinds: list[tuple[str, dict[str, int]]] = [(name, {}) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v")]
        kinds += [("gpipe", {"chunks": 2}), ("interleaved", {"chunks": 2}), ("interleaved", {"chunks": 3})]
        kinds += [("1f1b", {"slack": count - 1}), ("1f1b", {"slack": 2 * count})]
        for name, options in kinds:
            for number in range(8):
                skips, uneven, evaluation = bool(number & 1), bool(number & 2), bool(number & 4)
                microbatches = count + 2 if not options.get("slack") else 3 * count
                yield Case(name, count, microbatches, skips, uneven, not evaluation, tuple(options.items()))


@dataclass(frozen=True)
class Recorded:
    """The programs of all hosts in one case."""

    case: Case
    schedule: Schedule
    routes: Routes
    programs: tuple[tuple[Entry, ...], ...]


def with_host_waits(programs: Sequence[Sequence[Entry]]) -> list[list[Entry]]:
    """Return the programs of a model with an op in every forward for which the host waits (``.item()``)."""
    return [
        [
            part
            for entry in program
            for part in ((entry, Sync()) if isinstance(entry, Compute) and entry.action.kind == "F" else (entry,))
        ]
        for program in programs
    ]


def record_posts(case: Case, posting: int | str) -> Recorded:
    """Run two steps of a case and return what the hosts did.

    `posting`: the number of receives that are posted ahead, or ``planned`` (see `pipepart.schedule.channel_programs`).
    """
    schedule = case.make_schedule()
    recording, chunks = _chunks(schedule.chunks, case.skips)
    routes = Routes.of(chunks, schedule.placement)
    messages = messages_of(schedule, routes.forward, () if schedule.forward_only else routes.backward_pairs)
    lines = _Lines()
    logs = [_Log(stage, set_up_posts(stage, messages.channels)) for stage in range(schedule.stages)]
    failures: list[BaseException] = []

    def run(log: _Log) -> None:
        try:
            # The program of this stage, for `_planned_receives`.
            _current.due = receives_due(messages.program[log.stage])
            _run_stage(case, schedule, routes, recording, chunks, log, lines)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(log,)) for log in logs]
    with _as_two_transports(), _planned_receives() if posting == "planned" else mock.patch.object(
        mailbox, "_AHEAD", posting
    ):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return Recorded(case, schedule, routes, tuple(log.program() for log in logs))


def _run_stage(
    case: Case,
    schedule: Schedule,
    routes: Routes,
    recording: Recording,
    chunks: Sequence[Chunk],
    log: _Log,
    lines: _Lines,
) -> None:
    own = {chunk.index: chunk for chunk in chunks if schedule.placement[chunk.index] == log.stage}
    assert recording.loss_index is not None
    runner = Executor(_stage_chunks(log, lines, own, len(chunks) - 1, routes, {"loss": recording.loss_index}))
    first, last, count = schedule.placement[0], schedule.placement[-1], schedule.microbatches
    sizes = [2 + (case.uneven and k < count // 2) for k in range(count)]
    leaves = [dict(zip((i.name for i in recording.inputs), _batch(size))) for size in sizes]
    batch = PreparedBatch(
        MicrobatchSizes(tuple(sizes)), tuple(size - 2 for size in sizes), {}, sum(sizes), None, None,
        leaves if log.stage == first else None,
    )  # fmt: skip
    for _ in range(2):
        _share(log, first, schedule.stages)  # the header of the step
        runner.run(schedule, StepWork(batch, (1.0 / count,) * count, trace=log))  # type: ignore[arg-type]
        if log.stage == last:
            log.add_entry(Sync())  # the loss is read
        _share(log, last, schedule.stages)


def _share(log: _Log, source: int, stages: int) -> None:
    """Log the message in host memory by which all stages learn a value of one."""
    for other in range(stages):
        if other != source and source == log.stage:
            log.add_control("send", other)
        elif other == log.stage != source:
            log.add_control("recv", source)


# ---- the model


class _Net(nn.Module):
    """A linear layer for each chunk; with skips, each uses the results of the two before it, and the last all ends."""

    def __init__(self, layers: int, skips: bool) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers)), skips

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            seen.append(x)
            x = layer(x + seen[index - 1] if self.skips and index > 1 else x)
        x = x + seen[1] if self.skips else x
        return (x - y).pow(2).mean()


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(size, 2), torch.zeros(size, 2)


@cache
def _chunks(count: int, skips: bool) -> tuple[Recording, tuple[Chunk, ...]]:
    """Return a recorded model and its chunks, one for each layer. Sums belong to the layer after them."""
    recording = record(_Net(count, skips), _batch(2))
    layers = [op.module for node in recording.ops if (op := op_of(node)).module.startswith("layers.")]
    chunk_of, ahead = [], 0
    for node in recording.ops:
        chunk_of.append(min(ahead, count - 1))
        ahead += op_of(node).module.startswith("layers.")
    assert len(layers) == count
    return recording, split(recording, chunk_of, count)


# ---- the transports


@dataclass
class _Line:
    """The transfers from one stage to another, in their order."""

    values: SimpleQueue[torch.Tensor] = field(default_factory=SimpleQueue)
    receives: deque[_Pending] = field(default_factory=deque)


class _Lines(dict[tuple[str, int, int], _Line]):
    """All lines by kind, source stage and target stage."""

    _lock = threading.Lock()

    def __missing__(self, key: tuple[str, int, int]) -> _Line:
        with self._lock:
            return self.setdefault(key, _Line())


class _Log:
    """What the host of a stage has done. It is the trace of its steps, too, and learns there what its posts are."""

    def __init__(self, stage: int, entries: Sequence[Entry]) -> None:
        self.stage = stage
        self._entries = list(entries)
        self._posts = sum(isinstance(entry, Post) for entry in entries)
        self._controls: dict[tuple[str, int], int] = {}
        self._actions: dict[int, Action] = {}
        self._unnamed: dict[str, list[int]] = {"SEND": [], "RECV": []}

    def add_entry(self, entry: Entry) -> None:
        self._entries.append(entry)

    def add_post(self, kind: str, peer: int, tensor: torch.Tensor) -> int:
        number, self._posts = self._posts, self._posts + 1
        self._entries.append(Post(number, kind, peer, tensor.numel() * tensor.element_size()))
        if kind == "send":
            self._unnamed["SEND"].append(number)
        return number

    def add_order(self, number: int, kind: str) -> None:
        self._entries.append(Order(number))
        if kind == "recv":
            self._unnamed["RECV"].append(number)

    def next_control(self, kind: str, peer: int) -> int:
        number = self._controls.get((kind, peer), 0)
        self._controls[kind, peer] = number + 1
        return number

    def add_control(self, kind: str, peer: int) -> None:
        self._entries.append(Control(kind, peer, self.next_control(kind, peer)))

    def now(self) -> None:
        """The beginning of an action, for the executor."""

    def add(self, action: Action, started: None) -> None:
        """The end of an action, for the executor."""
        if action.kind in COMPUTE:
            self._entries.append(Compute(action))
        else:
            self._actions.update(dict.fromkeys(self._unnamed[action.kind], action))
            self._unnamed[action.kind].clear()

    def program(self) -> tuple[Entry, ...]:
        """Return all entries, with the actions of the posts."""
        return tuple(
            replace(entry, action=self._actions.get(entry.number)) if isinstance(entry, Post) else entry
            for entry in self._entries
        )


class _Transport:
    """Matches sends and receives in memory and logs them: as transfers of a device, or as messages in host memory."""

    def __init__(self, log: _Log, lines: _Lines, kind: str) -> None:
        self.log, self._lines, self.kind = log, lines, kind

    def send(self, tensor: torch.Tensor, target: int) -> _Pending:
        self._lines[self.kind, self.log.stage, target].values.put(tensor.detach().clone())
        if self.kind == "control":
            self.log.add_control("send", target)
            return _Pending(self, "send", target, -1, None)
        return _Pending(self, "send", target, self.log.add_post("send", target, tensor), None)

    def recv(self, tensor: torch.Tensor, source: int) -> _Pending:
        line = self._lines[self.kind, source, self.log.stage]
        if self.kind == "control":
            number = self.log.next_control("recv", source)
        else:
            number = self.log.add_post("recv", source, tensor)
        pending = _Pending(self, "recv", source, number, tensor, line)
        line.receives.append(pending)
        return pending


@dataclass(eq=False)
class _Pending:
    """A transfer that was started. A send is never complete before it is waited for, as on a device that is late."""

    transport: _Transport
    kind: str
    peer: int
    number: int
    tensor: torch.Tensor | None
    line: _Line | None = None
    done: bool = False

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        log = self.transport.log
        if self.transport.kind == "device":
            log.add_order(self.number, self.kind)
        elif self.kind == "recv":
            log.add_entry(Control("recv", self.peer, self.number))
        while self.line is not None and not self.done:
            value = self.line.values.get(timeout=_PATIENCE)
            first = self.line.receives.popleft()
            assert first.tensor is not None
            assert (first.tensor.shape, first.tensor.dtype) == (value.shape, value.dtype), "another message was expected"
            first.tensor.copy_(value)
            first.done = True


# ---- all that depends on the present form of the executor

_current = threading.local()


def _stage_chunks(
    log: _Log, lines: _Lines, own: dict[int, Chunk], last: int, routes: Routes, roots: dict[str, int]
) -> StageChunks:
    """Return the chunks of a stage with transports that are logged."""
    device, control = _Transport(log, lines, "device"), _Transport(log, lines, "control")
    values: dict[str, Any] = {
        "stage": log.stage, "chunks": own, "last": last, "routes": routes, "roots": roots, "recompute": frozenset(),
        "transport": device, "control": control, "device": torch.device("cpu"),
    }  # fmt: skip
    names = {item.name for item in fields(StageChunks)}
    if "control" not in names:
        values["transport"] = _OneTransport(device, control)
    return StageChunks(**{name: value for name, value in values.items() if name in names})


class _OneTransport:
    """Divides the transfers of an executor with one transport into those of the device and those in host memory."""

    def __init__(self, device: _Transport, control: _Transport) -> None:
        self._device, self._control = device, control

    def send(self, tensor: torch.Tensor, target: int) -> _Pending:
        return (self._control if hasattr(tensor, "in_host_memory") else self._device).send(tensor, target)

    def recv(self, tensor: torch.Tensor, source: int) -> _Pending:
        reading = getattr(_current, "reading", False)
        return (self._control if reading else self._device).recv(tensor, source)


@contextmanager
def _as_two_transports() -> Iterator[None]:
    """Inside, forms, shapes and numbers are marked as messages in host memory, for an executor with one transport."""
    if "control" in {item.name for item in fields(StageChunks)}:
        yield
        return

    def marked(function: Any) -> Any:
        def call(*args: Any) -> Any:
            result = function(*args)
            for tensor in result if isinstance(result, tuple) else (result,):
                tensor.in_host_memory = True
            return result

        return call

    plain_read = mailbox.Inbox._read

    def read(self: Any, *args: Any) -> torch.Tensor:
        _current.reading = True
        try:
            return plain_read(self, *args)
        finally:
            _current.reading = False

    names = ("_encode_forms", "_shape_header", "_pack")
    with mock.patch.multiple(mailbox, **{name: marked(getattr(mailbox, name)) for name in names}):
        with mock.patch.object(mailbox.Inbox, "_read", read):
            yield


class _PlannedInbox(mailbox.Inbox):
    """An inbox that posts receives in the order of the plan."""

    def __init__(self, *args: Any) -> None:
        self._due = deque(_current.due.values())
        with mock.patch.object(self, "_post_ahead", lambda source: None):
            super().__init__(*args)
        for source in self._waiting:
            self._post_early(source)
        self.post_ahead()

    def take(self, message: Message) -> list[Any]:
        values = super().take(message)
        self._post_early(self._wire.routes.placement[message.source])
        return values

    def post_ahead(self) -> None:
        """Post the receives that the plan puts in front of the next action. Called after each action."""
        for message in self._due.popleft() if self._due else ():
            source = self._wire.routes.placement[message.source]
            while message in self._waiting[source]:
                self._post(source, may_block=True)

    def _post_early(self, source: int) -> None:
        """Post the next message of a channel, if nothing before it is open and it is one tensor."""
        if self._waiting[source] and not self._posted_from[source]:
            message = self._waiting[source][0]
            forward, routes = message.payload == "F", self._wire.routes
            pair = (message.source, message.target) if forward else (message.target, message.source)
            if len((routes.forward if forward else routes.gradients)[pair]) == 1:
                self._post(source, may_block=False)


@contextmanager
def _planned_receives() -> Iterator[None]:
    """Inside, executors post their receives in the order of the plan."""
    with mock.patch.object(executor, "Inbox", _PlannedInbox):
        yield
