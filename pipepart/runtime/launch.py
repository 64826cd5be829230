"""Joining the other processes of a job that a launcher such as torchrun has started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from pipepart.runtime.device import backend_for, local_device
from pipepart.runtime.rendezvous import local_store

__all__ = ["join_job", "processes_on_this_host", "world_size"]


def join_job(timeout: timedelta) -> torch.device:
    """Initialise `torch.distributed` from the launcher's variables if that was not done; returns this rank's device."""
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
    return dist.get_world_size() if dist.is_initialized() else 1


def processes_on_this_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
