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
    """The result of a meeting of agents."""

    store: dist.Store
    node: int
    """The number of this host in the job."""
    nodes: int
    """The number of hosts."""
    address: str
    """The address of the first host, as the others reach it."""

    def waiting(self) -> int:
        """A number that grows while other hosts wait to join: they have come after this turn was closed."""
        return int(self.store.add("waiting", 0))


def meet_agents(host: str, port: int, nodes: int, wait: int, least: int = 0, grace: float | None = None) -> Met:
    """Wait until the agents of all hosts are here, and return the number of this one; raise an error after `wait` seconds.

    If `least` hosts are enough, the first host begins without the others after `grace` seconds (default: `wait`). A process may
    meet again: for each run of a sweep, and after a failure. Each meeting is a turn that the first host opens and closes. A
    host that comes while a run goes on with fewer hosts than `nodes` waits for the next turn, as long as the first is there.
    """
    begun, least = time.monotonic(), least or nodes
    first, place, store = _opened(host, port, wait)
    store = dist.PrefixStore(f"pipepart/{token_digest()}", store)
    store.set_timeout(timedelta(seconds=wait))
    noted = late = False
    number, turn = (1, _opened_turn(store)) if first else (0, store)
    while True:  # not `store.wait`, in which Python handles no signals
        if not first and number == 0:
            number, turn = _joined_turn(store, place)
            if number == 0 and least < nodes and _wants_to_join(store, nodes):
                begun = time.monotonic()  # the run ends its turn after a checkpoint, which may take long
                if not late:
                    late = True
                    _say(f"a run goes on without this machine at {host}:{port}; waiting for its next checkpoint")
        if number and turn.check(["closed"]):
            count = int(turn.get("closed"))
            if number <= count:
                break
            number = 0  # too late for this one
        here, passed = turn.add("here", 0) if number else 0, time.monotonic() - begun
        if first and (here >= nodes or (here >= least and passed > (wait if grace is None else grace))):
            told = turn.get("address").decode(errors="replace") if turn.check(["address"]) else place
            turn.set("main", told if is_here(told) else place)
            turn.set("closed", str(min(here, nodes)))
            continue
        if passed > wait:
            raise PipelineError(
                f"the {nodes} machines of this job have not met at {_SOURCE}={host}:{port} within {wait} s: "
                f"{here} of them came. Start the same command, with the same launcher.nodes and the same "
                "PIPEPART_TOKEN, on each of them, or set a larger launcher.wait."
            )
        if passed > _NOTE and not noted:
            noted = True
            _say(f"waiting for {nodes - here} of {nodes} machines at {host}:{port} (at most {wait} s)")
        time.sleep(_PAUSE)
    return Met(turn, number - 1, count, turn.get("main").decode(errors="replace"))


def _opened_turn(store: dist.Store) -> dist.Store:
    """Open the next turn, with this host, the first one, as its number 1."""
    number = store.add("turn", 0) + 1
    turn = dist.PrefixStore(str(number), store)
    turn.add("here", 1)
    store.add("turn", 1)
    return turn


def _joined_turn(store: dist.Store, place: str) -> tuple[int, dist.Store]:
    """Join the turn that is open; returns the number of this host in it, or 0 if none is."""
    turn = dist.PrefixStore(str(store.add("turn", 0)), store)
    if store.add("turn", 0) == 0 or turn.check(["closed"]):
        return 0, store
    if not is_loopback(place):
        turn.set("address", place)
    return turn.add("here", 1), turn


def _wants_to_join(store: dist.Store, nodes: int) -> bool:
    """Say in the turn of a run with fewer hosts that another one is here; returns whether there is such a run."""
    number = store.add("turn", 0)
    turn = dist.PrefixStore(str(number), store)
    if number == 0 or not turn.check(["closed"]) or int(turn.get("closed")) >= nodes:
        return False
    turn.add("waiting", 1)
    return True


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
