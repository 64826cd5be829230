"""Transports that match transfers in memory, and the log of what the host of a stage does with them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import torch

from pipepart.schedule import COMPUTE, Action
from pipepart.schedule.channel_rules import Compute, Control, Entry, Order, Post

__all__ = ["HostLog", "Lines", "LoggedTransport"]

_PATIENCE = 30.0  # seconds until a receive that nobody answers is an error of the executor


@dataclass
class Line:
    """The transfers from one stage to another, in their order."""

    values: SimpleQueue[torch.Tensor] = field(default_factory=SimpleQueue)
    receives: deque[Pending] = field(default_factory=deque)


class Lines(dict[tuple[str, int, int], Line]):
    """All lines by kind, source stage and target stage."""

    _lock = threading.Lock()

    def __missing__(self, key: tuple[str, int, int]) -> Line:
        with self._lock:
            return self.setdefault(key, Line())


class HostLog:
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


class LoggedTransport:
    """Matches sends and receives in memory and logs them: as transfers of a device, or as messages in host memory."""

    def __init__(self, log: HostLog, lines: Lines, kind: str, ahead: int | None = None) -> None:
        self.log, self._lines, self.kind, self.ahead = log, lines, kind, ahead

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: lines are made when they are used, and `set_up_posts` stands for the communicators."""

    def close(self) -> None:
        """Do nothing."""

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        self._lines[self.kind, self.log.stage, target].values.put(tensor.detach().clone())
        if self.kind == "control":
            self.log.add_control("send", target)
            return Pending(self, "send", target, -1, None)
        return Pending(self, "send", target, self.log.add_post("send", target, tensor), None)

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        line = self._lines[self.kind, source, self.log.stage]
        if self.kind == "control":
            number = self.log.next_control("recv", source)
        else:
            number = self.log.add_post("recv", source, tensor)
        pending = Pending(self, "recv", source, number, tensor, line)
        line.receives.append(pending)
        return pending


@dataclass(eq=False)
class Pending:
    """A transfer that was started. A send is never complete before it is waited for, as on a device that is late."""

    transport: LoggedTransport
    kind: str
    peer: int
    number: int
    tensor: torch.Tensor | None
    line: Line | None = None
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
            assert (first.tensor.shape, first.tensor.dtype) == (value.shape, value.dtype), (
                "another message was expected"
            )
            first.tensor.copy_(value)
            first.done = True
