"""Connections to other hosts, and calls of a store there, that do not wait for ever.

A host that is cut off does not close its connections. The kernel repeats what was sent for a quarter of an hour, and a call of
torch's store waits for its answer as long, whatever its timeout is; and ranks that wait for a checkpoint wait for hours.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["answer_of", "end_when_silent"]

T = TypeVar("T")
_LOOK = 1.0  # seconds between two checks


def end_when_silent(address: str, seconds: float) -> None:
    """Let connections of this process from an address of this host to other hosts end after `seconds` of silence.

    They end with an error, also while nobody waits for them. Only Linux has all that this needs.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT") or not os.path.isdir("/proc/self/fd"):
        return
    idle = max(1, int(seconds / 2))
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or not _leads_away(connection, address):
                    continue
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(seconds * 1000)))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # the kernel asks an idle peer
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle // 2))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _leads_away(connection: socket.socket, address: str) -> bool:
    """Return whether a connection goes from this address to another one. An IPv6 socket may have an IPv4 address."""
    here, there = (str(end[0]).removeprefix("::ffff:") for end in (connection.getsockname(), connection.getpeername()))
    return here == address != there


def answer_of(call: Callable[[], T], seconds: float, check: Callable[[], None] | None = None) -> tuple[T | None, bool]:
    """Return the result of a call of the store, and whether there is one: not after an error, nor after `seconds`.

    `check` is called meanwhile and may raise.
    """
    found: list[T] = []

    def ask() -> None:
        with suppress(Exception):
            found.append(call())

    thread = threading.Thread(target=ask, daemon=True, name="pipepart-store")
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(left if check is None else min(left, _LOOK))
        if check is not None and thread.is_alive():
            check()
    return (found[0], True) if found else (None, False)
