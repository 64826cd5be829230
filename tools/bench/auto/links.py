"""The transports of the runtime against the links that planning assumes: latency and bandwidth on real processes."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tools.bench.runtime.processes import on_ranks

__all__ = ["links"]

_SIZES = (64, 1 << 20, 4 << 20)


def _one_way(rank: int, size: int, transport_name: str, rounds: int) -> list[float]:
    """Median seconds of one message of each size: half of a round trip."""
    from pipepart.runtime.mesh import Groups, Mesh
    from pipepart.runtime.transport import choose_transport

    groups = Groups.create(Mesh(1, size), timedelta(seconds=60))
    transport = choose_transport(transport_name, groups, torch.device("cpu"), 60.0)
    found = []
    for count in _SIZES:
        data = torch.zeros(count, dtype=torch.uint8)
        times = []
        for _ in range(rounds):
            dist.barrier()
            started = time.perf_counter()
            if rank == 0:
                transport.send(data, 1).wait()
                transport.recv(data, 1).wait()
            else:
                transport.recv(data, 0).wait()
                transport.send(data, 0).wait()
            times.append((time.perf_counter() - started) / 2)
        found.append(statistics.median(times[rounds // 4 :]))
    return found


def _sum(rank: int, size: int, rounds: int) -> list[float]:
    """Median seconds of an all-reduce of each size."""
    found = []
    for count in _SIZES:
        data = torch.zeros(max(1, count // 4))
        times = []
        for _ in range(rounds):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(data)
            times.append(time.perf_counter() - started)
        found.append(statistics.median(times[rounds // 4 :]))
    return found


def links(rounds: int = 40) -> str:
    """A table: each transport as measured, and what planning assumes for it."""
    from pipepart.cost.this_machine import this_machine
    from pipepart.planning.layout import GROUP_LINK, LOCAL_LINK, Layout

    machine = this_machine()
    kind = next(iter(machine.links.values()))
    lines = [f"{'':24}" + "".join(f"{size:>14,} B" for size in _SIZES)]

    def row(name: str, seconds: list[float]) -> None:
        lines.append(f"{name:24}" + "".join(f"{value * 1e6:13.0f} us" for value in seconds))

    row("shared memory, measured", on_ranks(2, _one_way, "shared_memory", rounds)[0])
    row("  this machine's link", [kind.latency + size / kind.bandwidth for size in _SIZES])
    row("  assumed without one", [LOCAL_LINK.seconds(size) for size in _SIZES])
    row("gloo, measured", on_ranks(2, _one_way, "group", rounds)[0])
    row("all-reduce, measured", on_ranks(2, _sum, rounds)[0])
    two = Layout(1, 2, (float("inf"),), across=GROUP_LINK)
    row("  assumed", [two.reduce_seconds(0, size) for size in _SIZES])
    return "\n".join(lines)
