"""All that depends on the kind of device: backends, threads, waiting. Nothing else in the runtime knows CUDA."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from pipepart.machine import usable_cores

__all__ = [
    "Stopwatch",
    "backend_for",
    "generators",
    "limit_threads",
    "local_device",
    "random_state",
    "set_random_state",
    "synchronize",
]


def backend_for(device: torch.device) -> str:
    """The `torch.distributed` backend for tensors on this device. CUDA jobs use gloo too, for plain objects."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def local_device(local_rank: int) -> torch.device:
    """The device of a process: its own GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def limit_threads(processes_here: int) -> None:
    """Share the cores of this host among its processes: with more threads than cores, stages steal time from each other.

    A number that the user has set by OMP_NUM_THREADS is kept.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // max(1, processes_here)))


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read afterwards tells the time of the work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generators(device: torch.device) -> list[torch.Generator]:
    """The generators of torch that work on this device draws from."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


def random_state(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's generators that work on this device draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class Stopwatch:
    """Times of work on a device by the clock of its process, without waiting for the device in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin: Any = None
        if device.type == "cuda":
            synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            synchronize(device)
        self._began = time.perf_counter()

    def mark(self) -> Any:
        """This moment in the order of the device's work."""
        if self._origin is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """When the device came to the mark, as `time.perf_counter` would have said."""
        if self._origin is None:
            return float(mark)
        mark.synchronize()
        return float(self._began + self._origin.elapsed_time(mark) / 1000)
