"""The store in which the agents of a job on several hosts meet, and who serves it.

The host that has the address of the meeting serves the store, on that address only, and is the first host of the job, with
rank 0. All others connect to it.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pipepart.errors import ConfigError, PipelineError
from pipepart.runtime.addresses import check_host, is_here, is_loopback
from pipepart.runtime.port_store import reached_store
from pipepart.runtime.rendezvous import served_store, token_digest

__all__ = ["Met", "meet_agents"]

_SOURCE = "launcher.address"
_NOTE = 5.0  # seconds after which a wait is said
_PAUSE = 0.2
_served: dict[tuple[str, int], dist.Store] = {}
"""The stores that this process serves: a sweep meets again for each of its runs."""


@dataclass(frozen=True)
class Met:
    """The result of a meeting of all agents."""

    store: dist.Store
    node: int
    """The number of this host in the job."""
    address: str
    """The address of the first host, as the others reach it."""


def meet_agents(host: str, port: int, nodes: int, wait: int) -> Met:
    """Wait until the agents of all hosts are here, and return the number of this one; raise an error after `wait` seconds."""
    begun = time.monotonic()
    first, place, store = _opened(host, port, wait)
    store = dist.PrefixStore(f"pipepart/{token_digest()}", store)
    store.set_timeout(timedelta(seconds=wait))
    # A sweep meets once for each run: the first host counts its meetings, the others count themselves.
    turn, node = (store.add("first", 1) - 1, 0) if first else divmod(store.add("others", 1) - 1, nodes - 1)
    node += 0 if first else 1
    store = dist.PrefixStore(str(turn), store)
    if not first and not is_loopback(place):
        store.set("address", place)
    here = store.add("here", 1)
    if here == nodes:
        store.set("all here", "")
    noted = False
    while not store.check(["all here"]):  # not `wait`, in which Python handles no signals
        passed = time.monotonic() - begun
        if passed > wait:
            raise PipelineError(
                f"the {nodes} machines of this job have not met at {_SOURCE}={host}:{port} within {wait} s: "
                f"{store.add('here', 0)} of them came. Start the same command, with the same launcher.nodes and the same "
                "PIPEPART_TOKEN, on each of them, or set a larger launcher.wait."
            )
        if passed > _NOTE and not noted:
            noted = True
            _say(f"waiting for {nodes - store.add('here', 0)} of {nodes} machines at {host}:{port} (at most {wait} s)")
        time.sleep(_PAUSE)
    if first:
        told = store.get("address").decode(errors="replace") if store.check(["address"]) else place
        store.set("main", told if is_here(told) else place)
    return Met(store, node, store.get("main").decode(errors="replace"))


def _opened(host: str, port: int, wait: int) -> tuple[bool, str, dist.Store]:
    """Return whether this process serves the store, the address of the meeting as this host sees it, and the store."""
    addresses, limit, busy = check_host(host, _SOURCE), timedelta(seconds=wait), None
    here = next(filter(is_here, addresses), None)
    if here is not None:
        try:
            if (host, port) not in _served:
                _served[host, port] = served_store(host, port, limit, _SOURCE)
            return True, here, _served[host, port]
        except ConfigError as error:
            busy = error  # the port is that of another agent of this job on this host, or of another program
    try:
        place, store = reached_store(addresses, port, limit, _SOURCE, _say)
    except ConfigError as error:
        raise busy or error from None
    return False, place, store


def _say(text: str) -> None:
    print(f"pipepart on {socket.gethostname()} (process {os.getpid()}): {text}", flush=True)
