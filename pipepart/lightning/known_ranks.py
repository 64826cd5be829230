"""Ranks that a strategy knows without the devices of the trainer: in a job of one process, and in workers of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pipepart.errors import ConfigError
from pipepart.lightning.ray_workers import RayWorkers, environment_here
from pipepart.runtime import Mesh

__all__ = ["KnownRanks", "device_of"]


def device_of(local_rank: int, devices: Sequence[torch.device]) -> torch.device:
    """The device of the process with this number on its host, among the devices that the trainer uses here."""
    if local_rank >= len(devices):
        raise ConfigError(
            f"the process with number {local_rank} of this host has no device: the trainer uses {len(devices)} here "
            f"({', '.join(map(str, devices))}), one for each process. Start as many processes per host as Trainer(devices=...) "
            "says, and make all devices of the host visible to each of them."
        )
    return devices[local_rank]


class KnownRanks:
    """The ranks of a strategy. A job of one process needs neither a launcher nor variables of a cluster."""

    num_nodes: int
    parallel_devices: list[torch.device] | None
    _environment: Any = None

    if TYPE_CHECKING:
        cluster_environment: Any
    else:

        @property
        def cluster_environment(self) -> Any:
            return self._environment

        @cluster_environment.setter
        def cluster_environment(self, found: Any) -> None:
            self._environment = environment_here(found)

    @property
    def num_processes(self) -> int:
        """The number of processes of the job on this host."""
        if isinstance(self._environment, RayWorkers):
            return self._environment.workers_here()
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def _processes(self) -> int:
        """The number of processes of the job."""
        if isinstance(self._environment, RayWorkers):
            return self._environment.world_size()
        return self.num_nodes * self.num_processes

    @property
    def data_mesh(self) -> Mesh:
        """The replicas that divide the training data, each with its stages."""
        own: Any = self
        found: Mesh = own.mesh
        return found

    @property
    def _alone(self) -> bool:
        return self._processes == 1

    @property
    def _launched(self) -> bool:
        """Whether the strategy has to start the other processes of the job, or to see that a launcher has."""
        return not self._alone and not isinstance(self._environment, RayWorkers)

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        assert devices is not None
        if isinstance(self._environment, RayWorkers):
            return self._environment.device(devices[0].type)
        return device_of(self.local_rank, devices)

    @property
    def global_rank(self) -> int:
        return 0 if self._alone else self._asked("global_rank")

    @property
    def local_rank(self) -> int:
        return 0 if self._alone else self._asked("local_rank")

    @property
    def node_rank(self) -> int:
        return 0 if self._alone else self._asked("node_rank")

    @property
    def world_size(self) -> int:
        return 1 if self._alone else self._asked("world_size")

    def _asked(self, name: str) -> int:
        base: Any = super()
        value: int = getattr(base, name)
        return value
