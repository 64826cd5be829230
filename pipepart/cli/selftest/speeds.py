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

__all__ = ["measure_all_reduce", "measure_device", "measure_pair", "message_sizes", "readable_bytes"]

_SPEED_DTYPES = ("float32", "bfloat16", "float16")


def message_sizes(host: bool, quick: bool) -> list[int]:
    """Return the sizes of messages in bytes: the smallest shows the latency, the largest the bandwidth."""
    largest = (20 if host else 24) if quick else (24 if host else 28)
    return [1 << power for power in range(10, largest + 1, 2 if not quick else 5)] + ([1 << largest] if quick else [])


def readable_bytes(count: float) -> str:
    """Return a number of bytes in the largest unit that keeps it above 1."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count:.0f} B"


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
    speeds = ", ".join(f"{name} {value / 1e12:.3g} TFLOP/s" for name, value in flops.items())
    return passed(f"{speeds}, memory {bandwidth / 1e9:.3g} GB/s, start of an op {launch * 1e6:.3g} us", **figures)


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
        latency = times[smallest]
        spent = times[largest] - latency
        figures = {
            "latency": latency,
            "bandwidth": (largest - smallest) / (spent if spent > 0 else times[largest]),
            "seconds": {str(size): seconds for size, seconds in times.items()},
        }
    place.meet()
    if not figures:
        return passed("waited")
    return passed(f"latency {figures['latency'] * 1e6:.3g} us, {figures['bandwidth'] / 1e9:.3g} GB/s", **figures)


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
        f"{times[min(times)] * 1e6:.3g} us for {readable_bytes(min(times))}, {times[largest] * 1e3:.3g} ms for "
        f"{readable_bytes(largest)} ({moved / 1e9:.3g} GB/s per link)",
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
