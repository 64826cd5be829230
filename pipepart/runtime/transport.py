"""Transfers of tensors and plain values between the stages of one replica."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipepart.errors import ConfigError
from pipepart.runtime.mesh import Groups
from pipepart.runtime.signing import signed, verified

__all__ = ["GroupTransport", "Pending", "Transport", "choose_transport", "share"]

_FIXED = 2048  # bytes of the message that carries any ordinary value


class Pending(Protocol):
    """A transfer that has been started. It is waited for once."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """One ordered channel for each ordered pair of stages: messages arrive in the order of their sends."""

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        """Start to send to stage `target`. The tensor must not change until the transfer is done."""
        ...

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start to receive from stage `source` into `tensor`."""
        ...


class GroupTransport:
    """Point-to-point transfers of `torch.distributed`: gloo for CPU tensors, NCCL for CUDA tensors."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        group = self._groups.channel(self._groups.stage, target)
        return _started(dist.isend(tensor, self._groups.rank_of_stage(target), group=group))

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        group = self._groups.channel(source, self._groups.stage)
        return _started(dist.irecv(tensor, self._groups.rank_of_stage(source), group=group))


def _started(work: dist.Work | None) -> Pending:
    assert work is not None, "this rank is not in the group of the channel"
    return work


def choose_transport(name: str, groups: Groups, device: torch.device, timeout: float) -> Transport:
    """Return the transport with this name (option `transport`). Every rank of the replica must call it.

    ``group``: torch.distributed; ``shared_memory``: CPU processes of one host; ``auto``: the faster one that is possible.
    """
    from pipepart.runtime.shared_memory import SharedMemoryTransport, one_host

    together = name != "group" and device.type == "cpu" and one_host(groups)
    if name == "shared_memory" and not together:
        raise ConfigError(
            f"transport='shared_memory' needs CPU processes on one Linux host; this rank is on {device} and its replica is on "
            f"{'one host' if device.type != 'cpu' else 'several hosts'}. Use transport='auto'."
        )
    return SharedMemoryTransport(groups, timeout) if together else GroupTransport(groups)


def share(value: Any, groups: Groups, transport: Transport, source: int, device: torch.device) -> Any:
    """Return the plain value of stage `source` on all stages of the replica. All stages call it between two steps."""
    if groups.stage != source:
        raw = _receive(_FIXED, transport, source, device)
        length = int.from_bytes(raw[:8], "little")
        data = raw[8 : 8 + length] if length <= _FIXED - 8 else _receive(length, transport, source, device)
        return verified(data, groups)
    data = signed(value, groups)
    parts = [(len(data).to_bytes(8, "little") + data[: _FIXED - 8]).ljust(_FIXED, b"\0")]
    if len(data) > _FIXED - 8:
        parts.append(data)
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in parts]
    others = [stage for stage in range(groups.mesh.stages) if stage != source]
    for pending in [transport.send(tensor, stage) for stage in others for tensor in tensors]:
        pending.wait()
    return value


def _receive(size: int, transport: Transport, source: int, device: torch.device) -> bytes:
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    transport.recv(buffer, source).wait()
    return bytes(buffer.cpu().numpy().tobytes())
