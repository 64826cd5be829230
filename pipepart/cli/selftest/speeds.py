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
from pipepart.devices import computes_on_host, device_name, memory_of, synchronize
from pipepart.machine import usable
from pipepart.planning import format_seconds

__all__ = ["measure_all_reduce", "measure_device", "measure_pair", "message_sizes", "readable_bytes"]

_SPEED_DTYPES = ("float32", "bfloat16", "float16")
_SIZES = {(True, True): (22, 6), (True, False): (24, 2), (False, True): (24, 7), (False, False): (28, 2)}
"""For (in host memory, quick): the power of two of the largest message, and the step of powers from 1 KiB on."""
_LONG = 0.01  # seconds of a call that is long enough to be measured


def message_sizes(host: bool, quick: bool) -> list[int]:
    """Return the sizes of messages in bytes: the smallest shows the latency, the largest the bandwidth."""
    largest, step = _SIZES[host, quick]
    return [1 << power for power in range(10, largest + 1, step)]


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
    device = place.device
    host = computes_on_host(device)
    found = memory_of(device)
    free = found.free if found is not None else 1 << 30
    largest = 512 if host else 8192 if free > 8e9 else 2048
    flops: dict[str, float] = {}
    for name in _SPEED_DTYPES:
        if can_hold(device, getattr(torch, name)) and (not host or usable(name)):
            flops[name] = _product_speed(device, getattr(torch, name), 256, largest)
    bandwidth = _copy_speed(device, 1 << 20, 1 << 25 if host else min(1 << 30, free // 8))
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


def _product_speed(device: torch.device, dtype: torch.dtype, size: int, most: int) -> float:
    """Return the FLOP/s of a product of square matrices that is large enough to be measured."""
    while True:
        a, b = (torch.randn(size, size).to(device).to(dtype) for _ in range(2))
        seconds = _median(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        if seconds >= _LONG or 2 * size > most:
            return 2.0 * size**3 / seconds
        size *= 2


def _copy_speed(device: torch.device, size: int, most: int) -> float:
    """Return the bytes per second that a copy inside the memory of a device reads and writes."""
    while True:
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = _median(lambda a=source, b=target: b.copy_(a), device)  # type: ignore[misc]
        if seconds >= _LONG or 4 * size > most:
            return 2.0 * size / seconds
        size *= 4


def measure_pair(place: Place, first: int, second: int) -> Verdict:
    """Measure messages of every size between two ranks, there and back, while the others wait."""
    device, quick = place.device, place.settings.quick
    transport = place.transport("auto", device)
    figures: dict[str, Any] = {}
    lost = []
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
                lost.append(readable_bytes(size))
        smallest, largest = min(times), max(times)
        latency = min(times.values())  # on a busy machine, the smallest message is not always the fastest
        spent = max(times[largest] - latency, times[largest] / 2)
        figures = {
            "latency": latency,
            "bandwidth": (largest - smallest) / spent,
            "seconds": {str(size): seconds for size, seconds in times.items()},
        }
    place.meet()
    if lost:
        return failed(f"messages of {', '.join(lost)} from rank {other} were not received")
    if not figures:
        return passed("waited")
    return passed(f"latency {format_seconds(figures['latency'])}, {_rate(figures['bandwidth'], 'B/s')}", **figures)


def measure_all_reduce(place: Place) -> Verdict:
    """Measure the sum of a tensor of every size over all ranks."""
    device, group, times = place.device, place.device_groups.world, {}
    wrong, expected = [], place.size * (place.size + 1) / 2
    for size in message_sizes(computes_on_host(device), place.settings.quick):
        data = torch.full((size // 4,), float(place.rank + 1), device=device)
        dist.all_reduce(data, group=group)
        synchronize(device)
        if not bool((data == expected).all()):
            wrong.append(readable_bytes(size))  # all ranks go on: none may wait for one that has left
        data.zero_()
        times[size] = _median(lambda data=data: dist.all_reduce(data, group=group), device, 5)  # type: ignore[misc]
    if wrong:
        return failed(
            f"the sum of {', '.join(wrong)} over {place.size} ranks is wrong; expected {expected:g} everywhere"
        )
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
