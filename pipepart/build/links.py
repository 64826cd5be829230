"""The links of a job, measured when it starts: messages between neighbouring stages, and sums over the replicas of a stage.

Every rank measures with its own tensors on its device, all ranks at the same time, as in a step. A small message gives the
latency, a large one the bandwidth. The communicators exist already, so that this takes a few milliseconds on fast links.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipepart.devices import synchronize
from pipepart.partition import Link
from pipepart.planning.layout import MeasuredLinks
from pipepart.runtime import Groups, Mesh
from pipepart.runtime.meeting import meet

__all__ = ["OwnLinks", "joined_links", "measure_links"]

_SMALL = 8  # bytes
_LARGE = 16 * 2**20
_SMALL_REPEATS, _LARGE_REPEATS = 20, 3


@dataclass(frozen=True)
class OwnLinks:
    """The links that one rank has measured."""

    host: str
    messages: tuple[tuple[int, Link], ...] = ()
    """The ranks of neighbouring stages, with the links to them."""
    sums: Link | None = None
    """The link of the ring of the replicas of this stage; None with one replica."""


def measure_links(groups: Groups, device: torch.device, large: int = _LARGE) -> OwnLinks:
    """Measure the links of this rank. All ranks must call it; `large` are the bytes of a large message."""
    meet(groups)
    buffers = [torch.zeros(large, dtype=torch.uint8, device=device) for _ in range(2)]
    messages = [
        (peer, _message(groups, device, peer, buffers))
        for first in (0, 1)
        if (peer := _neighbour(groups, first)) is not None
    ]
    sums = None
    if groups.copies is not None:
        meet(groups)  # the replicas of a stage have finished their messages
        sums = _sums(groups.copies, groups.mesh.replicas, device, buffers[0])
    return OwnLinks(socket.gethostname(), tuple(messages), sums)


def _neighbour(groups: Groups, first: int) -> int | None:
    """Return the rank with which this one makes a pair, if pairs begin with stage `first`; None for a stage that is left."""
    stage = groups.stage
    other = stage + 1 if (stage - first) % 2 == 0 else stage - 1
    return groups.rank_of_stage(other) if 0 <= other < groups.mesh.stages else None


def _message(groups: Groups, device: torch.device, peer: int, buffers: Sequence[torch.Tensor]) -> Link:
    """Measure messages to and from a neighbour at the same time, as in a step."""

    def exchange(size: int) -> None:
        there, back = (buffer[:size] for buffer in buffers)
        # A batch uses the communicator of the group. Single sends would make one for each pair of ranks.
        both = [
            dist.P2POp(dist.isend, there, peer, group=groups.pipeline),
            dist.P2POp(dist.irecv, back, peer, group=groups.pipeline),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    small, large = _small_and_large(exchange, device, len(buffers[0]))
    return Link(len(buffers[0]) / (large - small), small)


def _sums(group: dist.ProcessGroup, members: int, device: torch.device, buffer: torch.Tensor) -> Link:
    """Measure a sum, and return the link of a ring that takes as long."""
    numbers = buffer.view(torch.float32)

    def reduce(size: int) -> None:
        dist.all_reduce(numbers[: size // 4], group=group)

    small, large = _small_and_large(reduce, device, len(buffer))
    hops = 2 * (members - 1)
    return Link(hops * len(buffer) / members / (large - small), small / hops)


def _small_and_large(run: Callable[[int], None], device: torch.device, size: int) -> tuple[float, float]:
    """Return the seconds of a small and of a large transfer; the large one takes longer."""
    found = []
    for count, repeats in ((_SMALL, _SMALL_REPEATS), (size, _LARGE_REPEATS)):
        run(count)
        synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            run(count)
        synchronize(device)
        found.append((time.perf_counter() - started) / repeats)
    small, large = found
    return small, max(large, small + 1e-9 * size / 1000)  # at most 1000 GB/s, if noise hides the difference


def joined_links(found: Sequence[OwnLinks], mesh: Mesh) -> MeasuredLinks:
    """Return the links of a job from those of all ranks, in the order of ranks: the slowest of each kind."""
    names = list(dict.fromkeys(own.host for own in found))
    hosts = tuple(names.index(own.host) for own in found)
    kinds: dict[tuple[str, bool], list[Link]] = {}
    for rank, own in enumerate(found):
        for peer, link in own.messages:
            kinds.setdefault(("messages", hosts[rank] == hosts[peer]), []).append(link)
        if own.sums is not None:
            ring = mesh.copies(mesh.stage_of(rank))
            kinds.setdefault(("sums", len({hosts[member] for member in ring}) == 1), []).append(own.sums)

    def slowest(kind: str, inside: bool) -> Link | None:
        links = kinds.get((kind, inside))
        if not links:
            return None
        return Link(min(link.bandwidth for link in links), max(link.latency for link in links))

    return MeasuredLinks(
        hosts,
        inside=slowest("messages", True),
        between=slowest("messages", False),
        sums_inside=slowest("sums", True),
        sums_between=slowest("sums", False),
    )
