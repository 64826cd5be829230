"""Torch's elastic agent, which starts and watches the ranks of this machine."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from pipepart.errors import ConfigError, PipelineError
from pipepart.runtime.rendezvous import check_host, token_digest

__all__ = ["launch_config"]

_BACKEND = "pipepart"


class _Meeting(RendezvousHandler):
    """The meeting of the agents of a job, one on each host.

    Torch's own meeting listens on every address of the host, and unpickles a key of a store that everyone can write. Here
    the store of one host is in the memory of its agent, and there is nothing to connect to. Agents of several hosts count
    themselves in a TCP store, in names that nobody knows without PIPEPART_TOKEN, and read plain text only.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters, self._closed = parameters, False

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        parameters = self._parameters
        nodes = parameters.max_nodes
        if nodes == 1:  # the ranks meet in the folder of the job, at no address
            return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))
        wait = int(parameters.config["timeout"])
        try:
            store: dist.Store = dist.PrefixStore(f"{parameters.run_id}/{token_digest()}", create_backend(parameters)[1])
            store.set_timeout(timedelta(seconds=wait))
            turn, node = divmod(store.add("agents", 1) - 1, nodes)  # a sweep meets once for each run
            store = dist.PrefixStore(str(turn), store)
            if node == nodes - 1:
                store.set("all here", "")
            deadline = time.monotonic() + wait
            while not store.check(["all here"]):  # not `wait`, in which Python handles no signals
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(0.2)
            return RendezvousInfo(store, node, nodes, RendezvousStoreInfo.build(node, store, parameters.local_addr))
        except (dist.DistError, RendezvousError, TimeoutError) as error:
            raise PipelineError(
                f"the {nodes} machines of this job have not met at launcher.address={parameters.endpoint} within {wait} s. "
                "Start the same command, with the same PIPEPART_TOKEN, on each of them, or set a larger launcher.wait."
            ) from error

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self._parameters.run_id)

    def shutdown(self) -> bool:
        self._closed = True
        return True


def launch_config(config: dict[str, Any], logs: Path, patience: int) -> LaunchConfig:
    """Return the settings of the agent. `patience` is the number of seconds that a rank has to end by itself."""
    count, launcher = int(config["devices"]), config["launcher"]
    nodes = int(launcher["nodes"])
    rendezvous_handler_registry.register(_BACKEND, _Meeting)
    if nodes > 1:
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
        rdzv_backend=_BACKEND,
        rdzv_endpoint="" if nodes == 1 else str(launcher["address"]),
        rdzv_configs={"timeout": int(launcher["wait"]), "read_timeout": int(launcher["wait"])},
        local_addr="127.0.0.1" if nodes == 1 else None,
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        shutdown_timeout=patience,
        # The output of the first rank is shown, that of the others is in their files.
        logs_specs=DefaultLogsSpecs(str(logs), redirects=dict.fromkeys(range(1, count), Std.ALL)),
    )
