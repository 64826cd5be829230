"""Transfers of tensors and plain values between the stages of one replica.

Tensors move over the transport of the device, plain values (forms, numbers, headers) over one in host memory: reading them
never makes the host wait for the device. On the CPU both are one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipepart.devices import computes_on_host, device_backend
from pipepart.errors import ConfigError
from pipepart.runtime.leaving import release_groups
from pipepart.runtime.mesh import Groups, own_group
from pipepart.runtime.signing import signed, verified

__all__ = [
    "DeviceTransport",
    "GroupTransport",
    "Pending",
    "Posts",
    "Transport",
    "broadcast",
    "choose_transport",
    "control_of",
    "received",
    "second_lane",
    "sendable",
    "share",
]

_FIXED = 2048  # bytes of the message that carries any ordinary value
_SENT_AS_THEY_ARE = frozenset(
    {torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""Dtypes that every backend sends. Tensors of other dtypes are sent as bytes."""


class Pending(Protocol):
    """A transfer that has been started. It is waited for once."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """One ordered channel for each ordered pair of stages: messages arrive in the order of their sends."""

    ahead: int | None
    """The messages of each channel whose receives are posted before they are needed; None: receives follow the plan."""

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Prepare the channels from stage to stage. All stages of the replica must call it together."""
        ...

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        """Start to send to stage `target`. The tensor must not change until the transfer is done."""
        ...

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start to receive from stage `source` into `tensor`."""
        ...

    def close(self) -> None:
        """Release the connections that belong to this transport alone."""
        ...


class GroupTransport:
    """Transfers of tensors in host memory by `torch.distributed`."""

    ahead: int | None = 2

    def __init__(self, groups: Groups, lane: int = 0) -> None:
        """Messages of different lanes do not wait for each other."""
        self._groups, self._lane = groups, lane

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: every pair of stages is connected."""

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        group = self._groups.channel(self._groups.stage, target)
        return _started(dist.isend(tensor, self._groups.rank_of_stage(target), group=group, tag=self._lane))

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        group = self._groups.channel(source, self._groups.stage)
        return _started(dist.irecv(tensor, self._groups.rank_of_stage(source), group=group, tag=self._lane))

    def close(self) -> None:
        """Do nothing: the groups belong to the job."""


class DeviceTransport:
    """Transfers of tensors on an accelerator: a communicator of its own for each direction of each pair of stages.

    Transfers of one communicator run in one order on both ends. A communicator that several pairs share would need one order
    for all of them, and one that is made at its first use makes the host wait for the other end. So all of them are made at
    set-up, in the same order on all ranks.

    Receives are posted in the order of the plan. On a device with few queues a transfer that waits for the one before it
    holds up all work behind it, so no fixed number of receives ahead is safe (`pipepart.schedule.channel_programs`).
    """

    ahead: int | None = None

    def __init__(self, groups: Groups, control: Transport) -> None:
        """`control`: the transport in host memory, for channels that are found to be needed after set-up."""
        self._groups, self.control = groups, control
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._opened: set[tuple[int, int]] = set()
        self._sealed = False

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make the channels from stage to stage that do not exist yet. All ranks of the job must call it together.

        After `seal`, it makes none: a step that is recorded later may be recorded by one replica alone. Messages between
        stages without a channel go through host memory, which is slow.
        """
        groups = self._groups
        for source, target in sorted(set(pairs) - self._opened) if not self._sealed else ():
            self._opened.add((source, target))
            ranks = [
                sorted((groups.mesh.rank(replica, source), groups.mesh.rank(replica, target)))
                for replica in range(groups.mesh.replicas)
            ]
            limit = timedelta(seconds=groups.timeout)
            made = own_group(groups.rank, ranks, limit, f"{groups.device.type}:{device_backend(groups.device)}")
            if made is None:
                continue
            self._channels[source, target] = made
            groups.watch_over(made)
            first = torch.zeros(1, device=groups.device)
            (self.send(first, target) if groups.stage == source else self.recv(first, source)).wait()

    def seal(self) -> None:
        """End set-up: from now on, no channels are made."""
        self._sealed = True

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        group = self._channels.get((self._groups.stage, target))
        if group is None:
            return self.control.send(tensor.cpu(), target)
        return _started(dist.isend(sendable(tensor), self._groups.rank_of_stage(target), group=group))

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        group = self._channels.get((source, self._groups.stage))
        if group is None:
            return _ThroughHost(self.control, tensor, source)
        return _started(dist.irecv(sendable(tensor), self._groups.rank_of_stage(source), group=group))

    def close(self) -> None:
        release_groups(self._channels.values())
        self._channels = {}


class _ThroughHost:
    """A receive of a tensor on a device through host memory."""

    def __init__(self, control: Transport, tensor: torch.Tensor, source: int) -> None:
        self._tensor, self._here = tensor, torch.empty_like(tensor, device="cpu")
        self._pending = control.recv(self._here, source)

    def is_completed(self) -> bool:
        return False  # not before it was copied

    def wait(self) -> None:
        self._pending.wait()
        self._tensor.copy_(self._here)


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same memory, as bytes if some backend does not send its dtype."""
    return tensor if tensor.dtype in _SENT_AS_THEY_ARE else tensor.reshape(-1).view(torch.uint8)


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Copy a tensor of rank `source` to all ranks of a group, in place, whatever its dtype and its strides."""
    if tensor.numel() == 0:
        return
    whole = tensor if tensor.is_contiguous() else tensor.contiguous()
    dist.broadcast(sendable(whole), source, group=group)
    if whole is not tensor:
        tensor.copy_(whole)


def _started(work: dist.Work | None) -> Pending:
    assert work is not None, "this rank is not in the group of the channel"
    return work


def choose_transport(name: str, groups: Groups, device: torch.device, timeout: float) -> Transport:
    """Return the transport with this name (option `transport`). Every rank of the replica must call it.

    ``group``: torch.distributed; ``shared_memory``: CPU processes of one host; ``auto``: the faster one that is possible.
    """
    from pipepart.runtime.shared_memory import SharedMemoryTransport, one_host

    on_host = computes_on_host(device)
    together = name != "group" and on_host and one_host(groups)
    if name == "shared_memory" and not together:
        raise ConfigError(
            f"transport='shared_memory' needs CPU processes on one Linux host; this rank is on {device} and its replica is on "
            f"{'several hosts' if on_host else 'one host'}. Use transport='auto'."
        )
    if not on_host:
        return DeviceTransport(groups, choose_transport("auto", groups, torch.device("cpu"), timeout))
    return SharedMemoryTransport(groups, timeout) if together else GroupTransport(groups)


def control_of(transport: Transport) -> Transport:
    """Return the transport for plain values in host memory that belongs to `transport`."""
    return transport.control if isinstance(transport, DeviceTransport) else transport


def second_lane(transport: Transport, groups: Groups) -> Transport | None:
    """Return a transport beside this one, whose messages do not wait for those of this one; None on an accelerator.

    All stages of the replica must call it together.
    """
    from pipepart.runtime.shared_memory import SharedMemoryTransport

    if isinstance(transport, SharedMemoryTransport):
        return SharedMemoryTransport(groups, groups.timeout)
    return GroupTransport(groups, lane=1) if isinstance(transport, GroupTransport) else None


class Posts:
    """Messages with plain values and tensors for other stages, for which the sender does not wait at once."""

    def __init__(self, groups: Groups, transport: Transport) -> None:
        self._groups, self._transport = groups, transport
        self._sent = 0
        self._open: deque[tuple[int, list[tuple[Pending, torch.Tensor]]]] = deque()
        """The number of each message under way, and its transfers."""

    def send(self, value: Any, stages: Iterable[int], most: int, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Start to send a value, and tensors whose forms it tells. The tensors must not change any more.

        If more than `most` messages are under way, wait for the first of them.
        """
        parts = [*_packed(value, self._groups), *(sendable(t.detach().contiguous()) for t in tensors if t.numel())]
        self._open.append(
            (self._sent, [(self._transport.send(part, stage), part) for stage in stages for part in parts])
        )
        self._sent += 1
        while self._open and all(pending.is_completed() for pending, _ in self._open[0][1]):
            self._open.popleft()
        self.finish(self._sent - most)

    def finish(self, before: int | None = None) -> None:
        """Wait until all messages, or those with numbers `before` this one, have arrived."""
        while self._open and (before is None or self._open[0][0] < before):
            for pending, _ in self._open.popleft()[1]:
                pending.wait()


def share(value: Any, groups: Groups, control: Transport, source: int) -> Any:
    """Return the plain value of stage `source` on all stages of the replica. All stages call it between two steps."""
    if groups.stage != source:
        return received(groups, control, source)
    others = [stage for stage in range(groups.mesh.stages) if stage != source]
    tensors = _packed(value, groups)
    for pending in [control.send(tensor, stage) for stage in others for tensor in tensors]:
        pending.wait()
    return value


def received(groups: Groups, control: Transport, source: int) -> Any:
    """Return the next plain value of stage `source`."""
    raw = _receive(_FIXED, control, source)
    length = int.from_bytes(raw[:8], "little")
    data = raw[8 : 8 + length] if length <= _FIXED - 8 else _receive(length, control, source)
    return verified(data, groups)


def _packed(value: Any, groups: Groups) -> list[torch.Tensor]:
    """Return the messages that carry a plain value."""
    data = signed(value, groups)
    parts = [(len(data).to_bytes(8, "little") + data[: _FIXED - 8]).ljust(_FIXED, b"\0")]
    if len(data) > _FIXED - 8:
        parts.append(data)
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]


def _receive(size: int, control: Transport, source: int) -> bytes:
    buffer = torch.empty(size, dtype=torch.uint8)
    control.recv(buffer, source).wait()
    return bytes(buffer.numpy().tobytes())
