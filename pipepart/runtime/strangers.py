"""Connections of other users of this host while process groups connect.

Gloo takes every connection to its port: the first one that sends the number of a pair of ranks becomes that pair. So while
groups connect, connections of other users are found by the owner of their other end, and closed. If there was one, an
error is raised before the groups are used: a pair that a stranger has taken over may wait until its timeout.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from pipepart.errors import PipelineError

__all__ = ["closed_to_strangers"]

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENS = "0A"
_CONNECTED = "01"
_INTERVAL = 0.5  # seconds; reading the table of a host takes some milliseconds
_AGAIN = 0.05


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
    except BaseException:
        watch.stop()
        watch.check(closed=False)  # ends that are closed may follow from the error
        raise
    watch.stop()
    watch.check()


class _Watch:
    """A thread that closes connections of other users until `stop`."""

    def __init__(self) -> None:
        self._before = set(_own_sockets())
        self._found: set[tuple[int | None, int]] = set()
        """User and port of each connection; no user if the other end is closed."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pipepart-strangers")
        self._thread.start()

    def stop(self) -> None:
        """Look for the last time."""
        self._done.set()
        self._thread.join()
        self._look()

    def check(self, closed: bool = True) -> None:
        """Raise an error if a stranger has been found or, with `closed`, a connection whose other end is closed."""
        users = sorted({(user, port) for user, port in self._found if user is not None})
        if users:
            who = ", ".join(f"user {user} (port {port})" for user, port in users)
            raise PipelineError(
                f"while the ranks of this job connected, another user of this host connected to this process: {who}. Those "
                "connections were closed; one of them may have taken the place of a rank. Run the job again."
            )
        if closed and self._found:
            raise PipelineError(
                "while the ranks of this job connected, a connection to this process was lost: Connection closed by peer. "
                "Another rank has ended, or another user of this host connected and left. Run the job again."
            )

    def _run(self) -> None:
        while not self._done.wait(_INTERVAL):
            with suppress(OSError):
                self._look()

    def _look(self) -> None:
        suspects = self._suspects()
        if suspects:  # the kernel writes the table row by row: a new connection may have been in half of it
            time.sleep(_AGAIN)
            again = self._suspects()
            for inode in suspects.keys() & again.keys():
                descriptor, user, port = again[inode]
                _shut(descriptor, inode)
                self._found.add((user, port))

    def _suspects(self) -> dict[int, tuple[int, int | None, int]]:
        """Connections with another user, by inode: descriptor, user, port."""
        own = {inode: descriptor for inode, descriptor in _own_sockets().items() if inode not in self._before}
        table = list(_connections()) if own else []
        ports = {_port(row.local) for row in table if row.state == _LISTENS and row.inode in own}
        ends = {(row.local, row.remote): row for row in table if row.state != _LISTENS}
        found = {}
        for row in table:
            if row.state == _LISTENS or row.inode not in own or _port(row.local) not in ports:
                continue
            other = ends.get((row.remote, row.local))
            if other is None and not _same_host(row):
                continue  # of another host
            if other is not None and other.state == _CONNECTED and other.user in (0, os.geteuid()):
                continue
            user = other.user if other is not None and other.state == _CONNECTED else None  # a closed end has no owner
            found[row.inode] = (own[row.inode], user, _port(row.local))
        return found


class _Row(NamedTuple):
    """A TCP socket of this host."""

    local: str
    remote: str
    state: str
    user: int
    inode: int


def _same_host(row: _Row) -> bool:
    """Return whether both ends of a connection must be on this host: loopback, or one address. Bytes are reversed in IPv4."""
    local, remote = (address.rpartition(":")[0] for address in row[:2])
    return local == remote or remote.endswith("7F")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _connections() -> Iterator[_Row]:
    for path in _TABLES:
        with suppress(OSError), open(path) as table:
            next(table)
            for line in table:
                fields = line.split()
                yield _Row(fields[1], fields[2], fields[3], int(fields[7]), int(fields[9]))


def _own_sockets() -> dict[int, int]:
    """The descriptor of each socket of this process, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def _shut(descriptor: int, inode: int) -> None:
    """Shut down a socket, unless its descriptor means another one by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.shutdown(socket.SHUT_RDWR)
