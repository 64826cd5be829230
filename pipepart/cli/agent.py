"""Torch's elastic agent, which starts and watches the ranks of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from pipepart.errors import ConfigError
from pipepart.runtime.rendezvous import check_host

__all__ = ["launch_config"]

_ALONE = "pipepart-one-host"


class _Alone(RendezvousHandler):
    """The rendezvous of a single agent. Its store is in its own memory, so that no other process can connect to it.

    Torch's own handler listens on every address of the machine, and unpickles a key of a store that everyone can write.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._name, self._closed = parameters.run_id, False

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return _ALONE

    def next_rendezvous(self) -> RendezvousInfo:
        # The ranks meet in the folder of the job, at no address.
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        self._closed = True
        return True


def launch_config(config: dict[str, Any], logs: Path, patience: int) -> LaunchConfig:
    """Return the settings of the agent. `patience` is the number of seconds that a rank has to end by itself."""
    count, launcher = int(config["devices"]), config["launcher"]
    nodes = int(launcher["nodes"])
    if nodes == 1:
        rendezvous_handler_registry.register(_ALONE, _Alone)
    else:
        try:
            host, _ = parse_rendezvous_endpoint(str(launcher["address"]), default_port=29400)
        except ValueError as error:
            raise ConfigError(f"launcher.address must be HOST:PORT, got {launcher['address']!r}: {error}") from error
        check_host(host, "launcher.address")
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=count,
        run_id=f"pipepart-{os.getpid()}" if nodes == 1 else "pipepart",
        rdzv_backend=_ALONE if nodes == 1 else "c10d",
        rdzv_endpoint="" if nodes == 1 else str(launcher["address"]),
        rdzv_configs={"timeout": int(launcher["wait"])},
        local_addr="127.0.0.1" if nodes == 1 else None,
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        shutdown_timeout=patience,
        # The output of the first rank is shown, that of the others is in their files.
        logs_specs=DefaultLogsSpecs(str(logs), redirects=dict.fromkeys(range(1, count), Std.ALL)),
    )
