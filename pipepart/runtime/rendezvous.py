"""How the processes of a job find each other. On one host nothing listens on any other address than loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from pipepart.errors import ConfigError

__all__ = ["local_store", "name_job"]

_JOB = "PIPEPART_JOB"


def name_job() -> None:
    """Name the job that this process is about to start the other processes of, before it starts them.

    Two jobs may have been told the same port. The second one cannot listen on it and ends, but its other processes would
    have met those of the first job by then: under a name of their own they meet nobody.
    """
    os.environ[_JOB] = uuid.uuid4().hex


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
        return _of_this_job(dist.TCPStore(address, port, size, False, timeout, wait_for_workers=False))
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
    descriptor = listener.detach()
    return _of_this_job(
        dist.TCPStore(address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    )


def _of_this_job(store: dist.Store) -> dist.Store:
    name = os.environ.get(_JOB)
    return dist.PrefixStore(name, store) if name else store


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
