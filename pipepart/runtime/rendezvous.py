"""How the processes of a job find each other. On one host nothing listens on any other address than loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from pipepart.errors import ConfigError

__all__ = ["local_store"]


def local_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> dist.Store | None:
    """A store for a job whose main address is loopback, so that all of it is on this host; None for all other jobs.

    By default the store listens on every address of the host, and gloo and NCCL on that of its name. What the user has
    said of interfaces is kept. Under torchrun the agent has made the store already.
    """
    if not _is_loopback(address):
        return None
    if interface := _loopback_interface():
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or size == 1:
        return None
    if rank != 0:
        return dist.TCPStore(address, port, size, False, timeout, wait_for_workers=False)
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:  # the others have been told this port: another way of meeting would leave them waiting
        listener.close()
        raise ConfigError(
            f"the processes of this job were to meet at 127.0.0.1:{port}, which cannot be listened on: {error}. Another job "
            "may use it: set MASTER_PORT to a free port."
        ) from error
    return dist.TCPStore(address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.IPv4Address(address).is_loopback
    return False


def _loopback_interface() -> str | None:
    with suppress(OSError):
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)
    return None
