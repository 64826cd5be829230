"""This machine as a cluster: it is measured on first use, and then read from the cache."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from pipepart.cost.cluster import MOST_DEVICES, Cluster, DeviceKind, LinkKind, Node
from pipepart.cost.device_memory import reserve_of
from pipepart.devices import accelerator, computes_on_host, device_count, device_name, memory_of, pinned, synchronize
from pipepart.errors import PipepartError
from pipepart.files import keep_json, load_json
from pipepart.machine import cache_folder, usable, usable_cores
from pipepart.values import Range

__all__ = ["MeasuredMachine", "measure_machine", "processor", "this_machine"]

_VERSION = 4
_NOT_KNOWN = 1e18
"""Bytes of a device that does not tell its memory."""


@dataclass(frozen=True)
class MeasuredMachine:
    """One device of a machine, the link between two devices, and the number of devices."""

    device: DeviceKind
    link: LinkKind
    count: Annotated[int, Range(1, MOST_DEVICES)]
    key: str
    """Everything that the measurement depends on."""


def this_machine() -> Cluster:
    """Return this machine: its GPUs, or its cores (one device per core, since ranks run one thread each)."""
    path = cache_folder() / "machine.json"
    found = _kept(path)
    if found is None:
        found = measure_machine()
        keep_json(path, asdict(found))
    device, link = found.device, found.link
    nodes = (Node((device.name,) * found.count, link.name),)
    return Cluster("local", {device.name: device}, {link.name: link}, nodes, link.name)


def measure_machine() -> MeasuredMachine:
    """Measure one device and the link between two devices, and count the devices (about a second)."""
    kind = accelerator()
    if kind is not None:
        count = device_count()
        where, other = torch.device(kind, 0), torch.device(kind, count - 1)
        found = memory_of(where)
        memory = float(found.total - reserve_of(found.total)) if found is not None else _NOT_KNOWN
        name = device_name(where).lower().replace(" ", "_")
    else:
        count = usable_cores()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / count
        where = other = torch.device("cpu")
        name = "core"
    threads = torch.get_num_threads()
    try:
        if where.type == "cpu":
            torch.set_num_threads(1)
        # A bfloat16 product would end this process on a CPU that announces units which the process may not use.
        half = not computes_on_host(where) or usable("bfloat16")
        dtypes = ("float32", "bfloat16") if half else ("float32",)
        flops = {dtype: _flops(where, getattr(torch, dtype)) for dtype in dtypes}
        bandwidth, launch = _bandwidth(where), _launch(where)
        link = _measured_link(where, other)
    finally:
        torch.set_num_threads(threads)
    # The efficiency is 1, since the speed of a product was measured.
    device = DeviceKind(name, flops, bandwidth, memory, efficiency=1.0, launch=launch)
    return MeasuredMachine(device, link, count, _key())


def processor() -> str:
    """Return the model of the processor; `platform.processor` is empty on many Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _kept(path: Path) -> MeasuredMachine | None:
    """Return the kept measurement. A file that is absent, damaged or of another machine is a miss."""
    try:
        found = load_json(path).read(MeasuredMachine)
    except PipepartError:
        return None
    return found if found.key == _key() else None


def _key() -> str:
    kind = accelerator()
    gpus = [device_name(torch.device(kind, i)) for i in range(device_count())] if kind is not None else []
    return json.dumps([_VERSION, processor(), usable_cores(), gpus, torch.__version__])


def _timed(run: Callable[[], object], *devices: torch.device, repeats: int = 7) -> float:
    """Return the median seconds of a call until all its devices have finished, after one call to warm up."""
    times = []
    for device in devices:
        synchronize(device)
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        for device in devices:
            synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _flops(where: torch.device, dtype: torch.dtype) -> float:
    size = 512 if computes_on_host(where) else 4096
    a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _timed(lambda: a @ b, where)


def _bandwidth(where: torch.device) -> float:
    size = 1 << (25 if computes_on_host(where) else 28)
    a = torch.zeros(size, dtype=torch.uint8, device=where)
    b = torch.empty_like(a)
    return 2.0 * size / _timed(lambda: b.copy_(a), where)


def _launch(where: torch.device) -> float:
    a = torch.ones(8, device=where)

    def many() -> None:
        for _ in range(100):
            a.add_(1.0)

    return _timed(many, where) / 100


def _measured_link(where: torch.device, other: torch.device) -> LinkKind:
    """Measure a copy from the first GPU to the last, or for cores a copy through a shared buffer and a pipe.

    A single GPU has no other one: its link is a copy through host memory, as between GPUs without a connection of their own.
    """
    if not computes_on_host(where):
        return _peer_link(where, other)
    size = 1 << 22
    a = torch.zeros(size, dtype=torch.uint8, device=where)
    shared = torch.zeros(size, dtype=torch.uint8)
    shared.share_memory_()  # type: ignore[no-untyped-call]
    back = torch.empty_like(a)

    def through() -> None:
        shared.copy_(a)
        back.copy_(shared)

    seconds = _timed(through, where)
    return LinkKind("shared_memory", size / seconds, _pipe_latency())


def _peer_link(where: torch.device, other: torch.device, size: int = 1 << 26) -> LinkKind:
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for device in (where, other))
    host = pinned(torch.zeros(size if where == other else 0, dtype=torch.uint8), where)

    def copy(count: int) -> None:
        if where == other:
            host[:count].copy_(a[:count], non_blocking=True)
            b[:count].copy_(host[:count], non_blocking=True)
        else:
            b[:count].copy_(a[:count], non_blocking=True)

    latency, whole = (_timed(partial(copy, count), where, other) for count in (8, size))
    return LinkKind("peer", size / max(whole - latency, 1e-9 * size / 1000), latency)


def _pipe_latency(rounds: int = 300) -> float:
    """Return half of a round trip to another process over pipes: the time to wake the other side."""
    echo = "import os\nwhile b := os.read(0, 1): os.write(1, b)"
    with subprocess.Popen([sys.executable, "-S", "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        there, back = peer.stdin.fileno(), peer.stdout.fileno()
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            os.write(there, b"x")
            os.read(back, 1)
            times.append(time.perf_counter() - start)
        peer.stdin.close()
    return statistics.median(times[rounds // 3 :]) / 2
