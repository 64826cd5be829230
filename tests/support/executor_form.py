"""All that the recorder of posts knows of the present form of the executor.

It has one transport for everything and posts a fixed number of receives ahead. Here its messages in host memory are
separated from its tensors, and its receives are posted in the order of the plan (see `pipepart.schedule.channel_programs`).
Each part is to be left out when the executor does the same itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest import mock

import torch

from pipepart.recording import Chunk
from pipepart.runtime import executor, mailbox
from pipepart.runtime.executor import StageChunks
from pipepart.runtime.mailbox import Routes
from pipepart.schedule import Message
from support.logged_transport import HostLog, Lines, LoggedTransport

__all__ = ["current", "posting_receives", "stage_chunks"]

current = threading.local()
"""Of the thread of a stage: `due`, the messages whose receives are posted before each action (see `receives_due`)."""


def stage_chunks(
    log: HostLog, lines: Lines, own: dict[int, Chunk], last: int, routes: Routes, roots: dict[str, int]
) -> StageChunks:
    """Return the chunks of a stage with transports that are logged."""
    device, control = LoggedTransport(log, lines, "device"), LoggedTransport(log, lines, "control")
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

    def __init__(self, device: LoggedTransport, control: LoggedTransport) -> None:
        self._device, self._control = device, control

    def send(self, tensor: torch.Tensor, target: int) -> Any:
        return (self._control if hasattr(tensor, "in_host_memory") else self._device).send(tensor, target)

    def recv(self, tensor: torch.Tensor, source: int) -> Any:
        reading = getattr(current, "reading", False)
        return (self._control if reading else self._device).recv(tensor, source)


@contextmanager
def _two_transports() -> Iterator[None]:
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
        current.reading = True
        try:
            return plain_read(self, *args)
        finally:
            current.reading = False

    names = ("_encode_forms", "_shape_header", "_pack")
    with mock.patch.multiple(mailbox, **{name: marked(getattr(mailbox, name)) for name in names}):
        with mock.patch.object(mailbox.Inbox, "_read", read):
            yield


class _PlannedInbox(mailbox.Inbox):
    """An inbox that posts receives in the order of the plan."""

    def __init__(self, *args: Any) -> None:
        self._due = deque(current.due.values())
        super().__init__(*args)
        self.post_ahead()

    def take(self, message: Message) -> list[Any]:
        values = super().take(message)
        self._post_ahead(self._wire.routes.placement[message.source])
        return values

    def post_ahead(self) -> None:
        """Post the receives that the plan puts in front of the next action. Called after each action."""
        for message in self._due.popleft() if self._due else ():
            source = self._wire.routes.placement[message.source]
            while message in self._waiting[source]:
                self._post(source, may_block=True)

    def _post_ahead(self, source: int) -> None:
        """Post the next message of a channel, if nothing before it is open and it is one tensor."""
        if self._waiting[source] and not self._posted_from[source]:
            message = self._waiting[source][0]
            forward, routes = message.payload == "F", self._wire.routes
            pair = (message.source, message.target) if forward else (message.target, message.source)
            if len((routes.forward if forward else routes.gradients)[pair]) == 1:
                self._post(source, may_block=False)


@contextmanager
def posting_receives(posting: int | str) -> Iterator[None]:
    """Inside, executors post so many receives of each channel ahead or, with ``planned``, in the order of the plan."""
    if posting == "planned":
        change = mock.patch.object(executor, "Inbox", _PlannedInbox)
    else:
        change = mock.patch.object(mailbox, "_AHEAD", posting)
    with _two_transports(), change:
        yield
