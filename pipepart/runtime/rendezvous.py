"""The meeting of the processes of a job in a shared store. On one host they listen on loopback only."""

from __future__ import annotations

import ipaddress
import os
import socket
import uuid
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from pipepart.errors import ConfigError
from pipepart.runtime.device import backend_for, local_device

__all__ = ["job_store", "join_job", "local_store", "name_job", "processes_on_this_host", "world_size"]

_JOB = "PIPEPART_JOB"


def join_job(timeout: timedelta) -> torch.device:
    """Initialise `torch.distributed`, unless it is, from the variables of torchrun. Returns the device of this rank."""
    device = local_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        store = local_store(address, port, rank, size, timeout)
        if store is None:
            dist.init_process_group(backend_for(device), timeout=timeout)
        else:
            dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=size, timeout=timeout)
    return device


def world_size() -> int:
    """Return the number of processes of this job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def processes_on_this_host() -> int:
    """Return the number of processes of this job that run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def job_store() -> dist.Store:
    """Return the key-value store that all ranks of the job share."""
    return dist.distributed_c10d._get_default_store()


def name_job() -> None:
    """Give a name to the job whose other processes this process is about to start.

    Two jobs may use the same port by mistake. The second job cannot listen on it and ends, but its other processes would
    join the store of the first job until then. The name separates their keys.
    """
    os.environ[_JOB] = uuid.uuid4().hex


def local_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> dist.Store | None:
    """Return a store for a job on this host only, whose main address is loopback; None for all other jobs.

    By default the store of torch listens on every address of the host, and gloo and NCCL on the address of the host name.
    Interfaces that the user has set are kept. Under torchrun the agent has made the store.
    """
    if not _is_loopback(address):
        return None
    if interface := _loopback_interface():
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or size == 1:
        return None
    descriptor = _listen(port) if rank == 0 else None
    store: dist.Store = dist.TCPStore(
        address, port, size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=descriptor
    )
    job = os.environ.get(_JOB)
    return dist.PrefixStore(job, store) if job else store


def _listen(port: int) -> int:
    """Return the descriptor of a socket that listens on this port of loopback."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:  # another port is no way out: the other ranks know this one only
        listener.close()
        raise ConfigError(
            f"rank 0 of this job cannot listen on 127.0.0.1:{port}, the port where its ranks meet: {error}. Another job may "
            "use it: set MASTER_PORT to a free port."
        ) from error
    return listener.detach()


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
