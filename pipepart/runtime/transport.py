"""Moving tensors between the stages of one replica."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipepart.errors import ConfigError
from pipepart.runtime.mesh import Groups

__all__ = ["GroupTransport", "Pending", "Transport", "choose_transport"]


class Pending(Protocol):
    """A transfer on its way. It is waited for once."""

    def wait(self) -> Any: ...


class Transport(Protocol):
    """One ordered channel for each ordered pair of stages: what is sent first is received first."""

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        """Start sending to stage `target`. The tensor must stay as it is until the transfer is done."""
        ...

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start receiving from stage `source` into `tensor`."""
        ...


class GroupTransport:
    """Point to point over `torch.distributed`: gloo for CPU tensors, NCCL for CUDA tensors."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def send(self, tensor: torch.Tensor, target: int) -> Pending:
        group = self._groups.channel(self._groups.stage, target)
        return _started(dist.isend(tensor, self._groups.rank_of_stage(target), group=group))

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        group = self._groups.channel(source, self._groups.stage)
        return _started(dist.irecv(tensor, self._groups.rank_of_stage(source), group=group))


def choose_transport(name: str, groups: Groups, device: torch.device, timeout: float) -> Transport:
    """``group``: torch.distributed; ``shared_memory``: CPU processes of one host; ``auto``: the faster one that fits.

    Every rank of the replica must call it.
    """
    from pipepart.runtime.shared_memory import SharedMemoryTransport, one_host

    together = name != "group" and device.type == "cpu" and one_host(groups)
    if name == "shared_memory" and not together:
        raise ConfigError(
            f"transport='shared_memory' needs CPU processes on one Linux host; this rank is on {device} and its replica is on "
            f"{'one host' if device.type != 'cpu' else 'several hosts'}. Use transport='auto'."
        )
    return SharedMemoryTransport(groups, timeout) if together else GroupTransport(groups)


def _started(work: dist.Work | None) -> Pending:
    assert work is not None, "this rank is not in the group of the channel"
    return work
