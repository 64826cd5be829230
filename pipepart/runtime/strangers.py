"""Connections of other users of this host while process groups connect.

Gloo takes every connection to its port: the first one that sends the number of a pair of ranks becomes that pair. So while
groups connect, connections of other users are found by the owner of their other end, and closed. A pair that a stranger had
taken over fails at once then; it neither waits nor talks to the stranger.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipepart.errors import PipelineError

__all__ = ["closed_to_strangers"]

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENS = "0A"
_INTERVAL = 0.5  # seconds; reading the table of a host takes some milliseconds


@contextmanager
def closed_to_strangers() -> Iterator[None]:
    """Close connections of other users to ports on which this process begins to listen inside, and raise an error if any.

    Root is trusted. Only Linux shows the owners of connections; elsewhere nothing is closed.
    """
    if not os.path.exists(_TABLES[0]):
        yield
        return
    watch = _Watch()
    try:
        yield
    finally:
        watch.stop()


class _Watch:
    """A thread that closes connections of other users until `stop`."""

    def __init__(self) -> None:
        self._before = set(_own_sockets())
        self._found: set[tuple[int, int]] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pipepart-strangers")
        self._thread.start()

    def stop(self) -> None:
        """Look for the last time, and raise an error if a stranger has been found."""
        self._done.set()
        self._thread.join()
        self._look()
        if self._found:
            who = ", ".join(f"user {user} (port {port})" for user, port in sorted(self._found))
            raise PipelineError(
                f"while the ranks of this job connected, another user of this host connected to this process: {who}. Those "
                "connections were closed; one of them may have taken the place of a rank. Run the job again."
            )

    def _run(self) -> None:
        while not self._done.wait(_INTERVAL):
            with suppress(OSError):
                self._look()

    def _look(self) -> None:
        own = {inode: descriptor for inode, descriptor in _own_sockets().items() if inode not in self._before}
        table = list(_connections()) if own else []
        ports = {_port(key[0]) for key, inode, _, state in table if state == _LISTENS and inode in own}
        users = {key: user for key, _, user, state in table if state != _LISTENS}
        for (local, remote), inode, _, state in table:
            user = users.get((remote, local))  # the owner of the other end, if that is on this host
            if state == _LISTENS or inode not in own or _port(local) not in ports or user in (None, 0, os.geteuid()):
                continue
            if _shut(own[inode], inode):
                self._found.add((user, _port(local)))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _connections() -> Iterator[tuple[tuple[str, str], int, int, str]]:
    """All TCP sockets of the host: (local address, remote address), inode, user, state."""
    for path in _TABLES:
        with suppress(OSError), open(path) as table:
            next(table)
            for line in table:
                fields = line.split()
                yield (fields[1], fields[2]), int(fields[9]), int(fields[7]), fields[3]


def _own_sockets() -> dict[int, int]:
    """The descriptor of each socket of this process, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def _shut(descriptor: int, inode: int) -> bool:
    """Shut down a socket, unless its descriptor means another one by now. Returns whether it was open."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
