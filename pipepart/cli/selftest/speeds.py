"""Measured speeds of devices and of the links between them, by message size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipepart.cli.selftest.crew import Place
from pipepart.cli.selftest.device_checks import can_hold, total_memory
from pipepart.cli.selftest.verdicts import Verdict, failed, passed
from pipepart.devices import computes_on_host, device_name, synchronize
from pipepart.machine import usable
from pipepart.planning import format_seconds

__all__ = ["measure_all_reduce", "measure_device", "measure_pair", "message_sizes", "readable_bytes"]

_SPEED_DTYPES = ("float32", "bfloat16", "float16")


def message_sizes(host: bool, quick: bool) -> list[int]:
    """Return the sizes of messages in bytes: the smallest shows the latency, the largest the bandwidth."""
    largest = (22 if host else 28) if quick else (24 if host else 28)
    return [1 << power for power in range(10, largest + 1, 6 if quick else 2)]


def readable_bytes(count: float) -> str:
    """Return a number of bytes in the largest unit that keeps it above 1."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count:.0f} B"


def _rate(value: float, unit: str) -> str:
    for prefix, power in (("T", 12), ("G", 9), ("M", 6)):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def measure_device(place: Place) -> Verdict:
    """Measure the speed of products, of copies in memory and of the start of an op on the device of this rank."""
    device, quick = place.device, place.settings.quick
    host = computes_on_host(device)
    size = (256 if quick else 512) if host else 4096
    flops: dict[str, float] = {}
    for name in _SPEED_DTYPES:
        if not can_hold(device, getattr(torch, name)) or (host and not usable(name)):
            continue
        a, b = (torch.randn(size, size).to(device).to(getattr(torch, name)) for _ in range(2))
        flops[name] = 2.0 * size**3 / _median(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    room = 1 << (24 if host else 28)
    source = torch.zeros(room, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2.0 * room / _median(lambda: target.copy_(source), device)
    small = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(100):
            small.add_(1.0)

    launch = _median(many, device) / 100
    memory = total_memory(device, place.size)
    figures = {
        "name": device_name(device),
        "flops": flops,
        "memory_bandwidth": bandwidth,
        "memory": memory,
        "launch": launch,
    }
    speeds = ", ".join(f"{name} {_rate(value, 'FLOP/s')}" for name, value in flops.items())
    return passed(f"{speeds}, memory {_rate(bandwidth, 'B/s')}, start of an op {format_seconds(launch)}", **figures)


def measure_pair(place: Place, first: int, second: int) -> Verdict:
    """Measure messages of every size between two ranks, there and back, while the others wait."""
    device, quick = place.device, place.settings.quick
    transport = place.transport("auto", device)
    figures: dict[str, Any] = {}
    if place.rank in (first, second):
        other, times = second if place.rank == first else first, {}
        for size in message_sizes(computes_on_host(device), quick):
            data, back = torch.ones(size, dtype=torch.uint8, device=device), torch.zeros(size, dtype=torch.uint8)
            back = back.to(device)

            def there_and_back(data: torch.Tensor = data, back: torch.Tensor = back) -> None:
                if place.rank == first:
                    sent = transport.send(data, other)
                    transport.recv(back, other).wait()
                else:
                    transport.recv(back, other).wait()
                    sent = transport.send(data, other)
                sent.wait()

            times[size] = _median(there_and_back, device, 5 if quick else 9) / 2
            if int(back[-1]) != 1:
                return failed(f"a message of {readable_bytes(size)} from rank {other} was not received")
        smallest, largest = min(times), max(times)
        latency = min(times.values())  # on a busy machine, the smallest message is not always the fastest
        spent = max(times[largest] - latency, times[largest] / 2)
        figures = {
            "latency": latency,
            "bandwidth": (largest - smallest) / spent,
            "seconds": {str(size): seconds for size, seconds in times.items()},
        }
    place.meet()
    if not figures:
        return passed("waited")
    return passed(f"latency {format_seconds(figures['latency'])}, {_rate(figures['bandwidth'], 'B/s')}", **figures)


def measure_all_reduce(place: Place) -> Verdict:
    """Measure the sum of a tensor of every size over all ranks."""
    device, group, times = place.device, place.device_groups.world, {}
    for size in message_sizes(computes_on_host(device), place.settings.quick):
        data = torch.full((size // 4,), float(place.rank + 1), device=device)
        dist.all_reduce(data, group=group)
        synchronize(device)
        expected = place.size * (place.size + 1) / 2
        if not bool((data == expected).all()):
            return failed(f"the sum of {readable_bytes(size)} over {place.size} ranks is wrong; expected {expected:g}")
        data.zero_()
        times[size] = _median(lambda data=data: dist.all_reduce(data, group=group), device, 5)  # type: ignore[misc]
    largest = max(times)
    moved = 2 * (place.size - 1) / place.size * largest / times[largest]
    return passed(
        f"{format_seconds(times[min(times)])} for {readable_bytes(min(times))}, {format_seconds(times[largest])} for "
        f"{readable_bytes(largest)} ({_rate(moved, 'B/s')} per link)",
        bandwidth=moved,
        seconds={str(size): seconds for size, seconds in times.items()},
    )


def _median(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds of a call, after one call to warm up."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])
