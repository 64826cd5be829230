"""Torch's elastic agent, which starts and watches the ranks of this machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
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

from pipepart.cli.meeting_point import Met, meet_agents
from pipepart.cli.restarts import RESUME, RUN_OF_MACHINES, SPARE, joining_note
from pipepart.errors import ConfigError, PipelineError
from pipepart.runtime.addresses import check_host, free_port
from pipepart.spare_files import SPARE_FOLDER, listed, newest_whole

__all__ = ["launch_config"]

_BACKEND = "pipepart"
_PORT = 29400
"""The port of a meeting at an address without one, as in torch."""
_LOOK = 2.0
"""Seconds between two looks for machines that want to join."""
_LAST_CALL = 10.0
"""Seconds that machines wait for the others before they go on without them."""


class _Meeting(RendezvousHandler):
    """The meeting of the agents of a job, one on each host.

    Torch's own meeting listens on every address of the host, and unpickles a key of a store that everyone can write. Here
    the store of one host is in the memory of its agent, and there is nothing to connect to. Agents of several hosts count
    themselves in a TCP store on one address (`meeting_point`), in names that nobody knows without PIPEPART_TOKEN, and read
    plain text only.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters, self._closed = parameters, False
        self._met: Met | None = None
        self._heard, self._looked = 0, 0.0

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        parameters = self._parameters
        if parameters.max_nodes == 1:  # the ranks meet in the folder of the job, at no address
            return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=_PORT)
        try:
            wait, grace = int(parameters.config["timeout"]), parameters.config["grace"]
            met = meet_agents(host, port, parameters.max_nodes, wait, parameters.min_nodes, grace)
            if met.node == 0:
                met.store.set("resume", parameters.config["resume"])
                met.store.set("port", str(free_port(met.address)))
            os.environ[RESUME] = met.store.get("resume").decode(errors="replace")
            os.environ[SPARE] = self._spare(met)
            self._met, self._heard, self._looked = met, 0, time.monotonic()
            main = RendezvousStoreInfo(met.address, int(met.store.get("port")))
        except dist.DistError as error:
            raise PipelineError(
                f"the connection to {parameters.endpoint}, where the machines of this job meet, was lost: {error}. The command "
                "on the machine with this address has ended, or the network between the machines is broken."
            ) from error
        return RendezvousInfo(met.store, met.node, met.nodes, main)

    def _spare(self, met: Met) -> str:
        """The newest state that the hosts of this meeting have in memory; empty if they go on from a checkpoint."""
        folder, joined = self._parameters.config["spare"], self._parameters.config["joined"]
        met.store.set(f"spare/{met.node}", listed(Path(folder)) if folder and not joined else "")
        if met.node == 0:
            lists = [met.store.get(f"spare/{node}").decode(errors="replace") for node in range(met.nodes)]
            met.store.set("spare", "" if joined else newest_whole(lists))
        return met.store.get("spare").decode(errors="replace")

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: ranks that torch restarts lose their steps. A note lets rank 0 end them after the next checkpoint.

        Torch asks again and again. A host that waits counts on; the note is removed when it does not.
        """
        met, now = self._met, time.monotonic()
        if met is None or met.node or met.nodes >= self._parameters.max_nodes or now - self._looked < _LOOK:
            return 0
        self._looked, note = now, Path(self._parameters.config["note"])
        with suppress(dist.DistError, OSError):
            heard = met.waiting()
            if heard > self._heard:
                note.touch()
            else:
                note.unlink(missing_ok=True)
            self._heard = heard
        return 0

    def get_run_id(self) -> str:
        return str(self._parameters.run_id)

    def shutdown(self) -> bool:
        self._closed = True
        return True


def launch_config(
    config: dict[str, Any],
    logs: Path,
    patience: int,
    start_method: str = "spawn",
    again: bool = False,
    joined: bool = False,
) -> LaunchConfig:
    """Return the settings of the agent. `patience` is the number of seconds that a rank has to end by itself.

    `again`: the job has lost ranks, and does not wait long for machines that it can go on without. `joined`: it has ended after
    a checkpoint, from which all go on.
    """
    count, launcher = int(config["devices"]), config["launcher"]
    nodes = int(launcher["nodes"])
    rendezvous_handler_registry.register(_BACKEND, _Meeting)
    if nodes > 1:
        try:
            host, _ = parse_rendezvous_endpoint(str(launcher["address"]), default_port=_PORT)
        except ValueError as error:
            raise ConfigError(f"launcher.address must be HOST:PORT, got {launcher['address']!r}: {error}") from error
        check_host(host, "launcher.address")
    return LaunchConfig(
        min_nodes=int(launcher["min_nodes"] or nodes),
        max_nodes=nodes,
        nproc_per_node=count,
        run_id=f"pipepart-{os.getpid()}" if nodes == 1 else RUN_OF_MACHINES,
        rdzv_backend=_BACKEND,
        rdzv_endpoint="" if nodes == 1 else str(launcher["address"]),
        rdzv_configs={
            "timeout": int(launcher["wait"]),
            "read_timeout": int(launcher["wait"]),
            "grace": _LAST_CALL if again else None,
            "resume": str(config.get("resume") or ""),
            "note": str(joining_note(logs.parent)),
            "spare": os.environ.get(SPARE_FOLDER, ""),
            "joined": joined,
        },
        local_addr="127.0.0.1" if nodes == 1 else None,
        max_restarts=0,
        monitor_interval=0.2,
        start_method=start_method,
        shutdown_timeout=patience,
        # The output of the first rank is shown, that of the others is in their files.
        logs_specs=DefaultLogsSpecs(str(logs), redirects=dict.fromkeys(range(1, count), Std.ALL)),
    )
