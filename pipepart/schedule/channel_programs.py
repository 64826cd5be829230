"""The programs of all hosts that follow from a schedule and its messages, for `channel_rules`, without running anything.

A stage posts the sends of an action after it, and its receives by one of two rules:

- *planned* (``ahead=None``): before each action, the receives that the order of one run of the whole schedule puts in front
  of it (`receives_due`), and, if it is a message of one tensor, the next receive of a channel as soon as all before it were
  taken, in front of the compute that uses them. Transfers are then handed over in one global order, in which a message is
  one moment, and those that are handed over earlier can start at once (the second tensor of a message could not). So
  nothing waits in a circle under any rule of `channel_rules`, and no host has to wait.
- a number ``ahead``: so many receives of each channel are posted before they are taken. No number is safe with one queue: a
  send blocks everything behind it until the receive of the send before it has started, and that receive may be behind work
  that needs this stage.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from pipepart.schedule.actions import COMPUTE, Action, Message, Schedule
from pipepart.schedule.channel_rules import (
    RULES,
    Compute,
    Control,
    Entry,
    HostWait,
    Order,
    Post,
    Stuck,
    Sync,
    check_posts,
)
from pipepart.schedule.messages import Messages

__all__ = ["channel_programs", "check_channels", "receives_due", "set_up_posts"]

Pair = tuple[int, int]
Kind = tuple[str, int, int]
"""Payload, source chunk and target chunk of a message."""


def receives_due(program: Iterable[Action]) -> dict[Action, tuple[Message, ...]]:
    """For each compute action of a stage the messages whose receives are posted before it (see `Messages.program`)."""
    due: dict[Action, tuple[Message, ...]] = {}
    found: list[Message] = []
    for action in program:
        if action.kind == "RECV":
            found.append(action.message)
        elif action.kind in COMPUTE:
            due[action] = tuple(found)
            found.clear()
    assert not found, f"{found[0].recv} is after the last action of its stage"
    return due


def set_up_posts(stage: int, channels: Iterable[Pair]) -> list[Entry]:
    """Return the tiny transfers of a stage that make the communicators of all channels, in one order for all stages."""
    mine = [pair for pair in sorted(channels) if stage in pair]
    posts: list[Entry] = [
        Post(n, "send", target, 1) if source == stage else Post(n, "recv", source, 1)
        for n, (source, target) in enumerate(mine)
    ]
    return posts + [HostWait(n) for n in range(len(mine))]


def check_channels(
    schedule: Schedule,
    messages: Messages,
    ahead: int | None = None,
    *,
    tensors: Mapping[Kind, int] | None = None,
    forms: Sequence[int] | None = None,
    rules: Sequence[str] = RULES,
) -> Stuck | None:
    """Return what hangs if a schedule runs with these messages on devices, or None if all its transfers end.

    `tensors`: the number of tensors in a message by payload, source chunk and target chunk, if it is not 1; `forms`: for
    each micro-batch a number for the shapes of its leaves, if they differ.

    Looks at the worst case: two steps, the first with forms that no receiver knows, and an op in every forward for which
    the host waits. A job whose host waits less often ends whenever this one does.
    """
    programs = channel_programs(schedule, messages, ahead=ahead, tensors=tensors, forms=forms, host_waits=True)
    found = (check_posts(programs, rule) for rule in rules)
    return next((stuck for stuck in found if stuck is not None), None)


def channel_programs(
    schedule: Schedule,
    messages: Messages,
    *,
    ahead: int | None = None,
    tensors: Mapping[Kind, int] | None = None,
    forms: Sequence[int] | None = None,
    steps: int = 2,
    host_waits: bool = False,
) -> list[list[Entry]]:
    """Return the program of each host: set-up and some steps, of which the first has new forms.

    `host_waits`: an op in every forward makes the host wait for the device. The other arguments are those of
    `check_channels`.
    """
    uses: defaultdict[tuple[str, int, int], list[Message]] = defaultdict(list)
    for channel in messages.channels.values():
        for message in channel:
            uses[message.payload, message.target, message.microbatch].append(message)
    for found in uses.values():
        found.sort(key=lambda message: message.source)
    programs = []
    for stage in range(schedule.stages):
        host = _Host(stage, schedule, messages, uses, ahead, tensors or {}, forms, host_waits)
        for _ in range(steps):
            host.step()
        programs.append(host.entries)
    return programs


class _Host:
    """What the host of one stage does, step by step."""

    def __init__(
        self,
        stage: int,
        schedule: Schedule,
        messages: Messages,
        uses: Mapping[tuple[str, int, int], Sequence[Message]],
        ahead: int | None,
        tensors: Mapping[Kind, int],
        forms: Sequence[int] | None,
        host_waits: bool,
    ) -> None:
        self._home, self._uses, self._tensors = schedule.placement, uses, tensors
        self._forms = forms or (0,) * schedule.microbatches
        self._ahead, self._planned, self._host_waits = ahead or 1, ahead is None, host_waits
        self._program = messages.program[stage]
        self._due = receives_due(self._program)
        self._expected = {source: found for (source, target), found in messages.channels.items() if target == stage}
        self.entries = set_up_posts(stage, messages.channels)
        self._count = sum(isinstance(entry, Post) for entry in self.entries)
        self._known: set[tuple[str, int, int, int]] = set()
        """The end, the pairs of chunks and the form of micro-batches whose form was sent or received."""
        self._control: defaultdict[tuple[str, int], int] = defaultdict(int)

    def step(self) -> None:
        """Add one step."""
        self._waiting = {source: deque(messages) for source, messages in self._expected.items()}
        self._posted: dict[Message, list[int]] = {}
        self._open = dict.fromkeys(self._waiting, 0)
        self._forwarded: set[Pair] = set()
        sends: list[int] = []
        behind = set(self._waiting)
        for action in self._program:
            if action.kind == "SEND":
                sends += self._send(action)
            if action.kind not in COMPUTE:
                continue
            self._post_ahead(behind)  # after the sends of the action before
            for message in self._due[action] if self._planned else ():
                self._post_until(message)
            payload = "F" if action.kind == "F" else "B"
            for message in () if action.kind == "W" else self._uses.get((payload, action.chunk, action.microbatch), ()):
                self._post_until(message)
                self.entries += [Order(number) for number in self._posted.pop(message)]
                source = self._home[message.source]
                self._open[source] -= 1
                behind.add(source)
                if self._planned:
                    self._post_ahead(behind)
            self.entries.append(Compute(action))
            if action.kind == "F":
                self._forwarded.add((action.chunk, action.microbatch))
                if self._host_waits:
                    self.entries.append(Sync())
        self.entries += [Order(number) for number in sends]

    def _send(self, action: Action) -> list[int]:
        message = action.message
        target = self._home[message.target]
        if message.payload == "F":
            self._tell_form("send", message, target)
        return self._post("send", target, action)

    def _post(self, kind: str, peer: int, action: Action) -> list[int]:
        numbers = list(range(self._count, self._count + self._size(action.message)))
        self.entries += [Post(number, kind, peer, 1, action) for number in numbers]
        self._count += len(numbers)
        return numbers

    def _size(self, message: Message) -> int:
        return self._tensors.get((message.payload, message.source, message.target), 1)

    def _form(self, kind: str, message: Message) -> tuple[str, int, int, int]:
        return kind, message.source, message.target, self._forms[message.microbatch]

    def _tell_form(self, kind: str, message: Message, peer: int) -> None:
        key = self._form(kind, message)
        if key not in self._known:
            self._known.add(key)
            self.entries.append(Control(kind, peer, self._control[kind, peer]))
            self._control[kind, peer] += 1

    def _post_until(self, message: Message) -> None:
        source = self._home[message.source]
        while message not in self._posted and message in self._waiting[source]:
            self._receive(source)

    def _receive(self, source: int) -> None:
        message = self._waiting[source].popleft()
        if message.payload == "F":
            self._tell_form("recv", message, source)
        self._posted[message] = self._post("recv", source, message.recv)
        self._open[source] += 1

    def _post_ahead(self, behind: set[int]) -> None:
        for source in sorted(behind):
            while self._waiting[source] and self._open[source] < self._ahead:
                message = self._waiting[source][0]
                if message.payload == "F":
                    known = self._form("recv", message) in self._known
                else:
                    known = (message.target, message.microbatch) in self._forwarded
                if not known or (self._planned and self._size(message) > 1):
                    break
                self._receive(source)
        behind.clear()
