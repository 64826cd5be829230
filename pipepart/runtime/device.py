"""Code that depends on the kind of device: backends, threads, generators, clocks. No other file of the runtime knows CUDA."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from pipepart.machine import usable_cores

__all__ = ["Stopwatch", "backend_for", "generators", "limit_threads", "local_device"]


def backend_for(device: torch.device) -> str:
    """Return the `torch.distributed` backend for tensors on `device`. CUDA jobs also use gloo, for plain objects."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def local_device(local_rank: int) -> torch.device:
    """Return the device of a process: its own GPU if the host has GPUs, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def limit_threads(processes_here: int) -> None:
    """Share the cores of this host among its processes, so that stages do not compete for cores.

    A number of threads that is set by OMP_NUM_THREADS is kept.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // max(1, processes_here)))


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators of torch that ops on `device` draw from."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


class Stopwatch:
    """Times of work on a device, on the clock of its process, without waiting for the device while it works."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin: Any = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            torch.cuda.synchronize(device)
        self._began = time.perf_counter()

    def mark(self) -> Any:
        """Return a mark at this point in the queue of the device."""
        if self._origin is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """Return the time at which the device reached `mark`, on the clock of `time.perf_counter`."""
        if self._origin is None:
            return float(mark)
        mark.synchronize()
        return float(self._began + self._origin.elapsed_time(mark) / 1000)
