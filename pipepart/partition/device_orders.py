"""The order in which chunks take devices: a line of places, or every way through a pool of devices.

::

    fixed order          a pool of two GPUs and one host, any order, fewer allowed
    (0)-A->(1)-B->(2)    (0,0) -gpu-> (1,0) -gpu-> (2,0)
                           |host        |host        |host
                         (0,1) -gpu-> (1,1) -gpu-> (2,1)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipepart.errors import PartitionError
from pipepart.partition.problem import Problem

__all__ = ["DeviceOrders", "DevicesUsed", "Place", "device_orders"]

_MOST_NODES = 4096
_UNBOUNDED = 1 << 61
"""A memory limit that no chunk reaches."""


@dataclass(frozen=True)
class Place:
    """The place of a chunk in the pipeline: everything besides its ops that its load depends on."""

    device: int
    kind: int
    """Row of the compute times that holds for the device."""
    held: int
    """Micro-batches whose saved bytes the chunk holds at once."""
    limit: int
    """Bytes for parameters and saved tensors."""
    link_in: int
    link_out: int
    """Index of the link over which the chunk receives and sends; -1: the device pays nothing."""

    @property
    def terms(self) -> tuple[int, int, int, int, int]:
        """The part that loads depend on: places with equal terms share their loads."""
        return self.kind, self.held, self.limit, self.link_in, self.link_out


@dataclass(frozen=True)
class DevicesUsed:
    """The devices that the first chunks use: one node on the way through the devices."""

    before: tuple[tuple[int, Place], ...]
    """Nodes that lead here, each with the place that the next chunk takes."""
    used: float
    """Work (relative to the fastest device) that these devices can do per tick of the bottleneck."""
    left: float
    """Work (relative to the fastest device) that the remaining devices can do per tick of the bottleneck."""
    final: bool


@dataclass(frozen=True)
class DeviceOrders:
    """All allowed orders of the devices. Every node comes after the nodes that lead to it; the first is the start."""

    nodes: tuple[DevicesUsed, ...]
    stages: tuple[int, ...]
    """Stage of each chunk; each chunk has its own stage if the devices are a pool."""

    def without_memory(self) -> DeviceOrders:
        """The same orders where memory cannot matter: places differ by device and links only."""
        nodes = []
        for node in self.nodes:
            before = tuple((b, dataclasses.replace(place, held=0, limit=_UNBOUNDED)) for b, place in node.before)
            nodes.append(dataclasses.replace(node, before=before))
        return DeviceOrders(tuple(nodes), self.stages)

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place in every order."""
        return tuple(place for node in self.nodes for _, place in node.before)


def device_orders(
    problem: Problem,
    slowness: Sequence[float],
    chunks: int,
    microbatches: int,
    *,
    shares: Sequence[float] | None = None,
) -> DeviceOrders:
    """The orders in which the chunks of a problem may take its devices.

    ``slowness`` is the least time of an op on each device kind, relative to the fastest device. ``shares`` is the part
    of its stage's memory that each chunk may use; by default all of it, which is a relaxation where a stage has several
    chunks.
    """
    if problem.any_order:
        return _pool(problem, slowness, chunks, microbatches)
    places = [
        _place(problem, chunk, problem.device(chunk), chunks, microbatches, 1.0 if shares is None else shares[chunk])
        for chunk in range(chunks)
    ]
    able = [1.0 / slowness[place.kind] for place in places]
    nodes = [DevicesUsed((), 0.0, sum(able), False)]
    for index, place in enumerate(places):
        final = index == chunks - 1 or problem.fewer
        nodes.append(DevicesUsed(((index, place),), sum(able[: index + 1]), sum(able[index + 1 :]), final))
    return DeviceOrders(tuple(nodes), tuple(problem.stage(chunk) for chunk in range(chunks)))


def _place(problem: Problem, chunk: int, device: int, chunks: int, microbatches: int, share: float = 1.0) -> Place:
    """The place of a chunk on a device; ``share`` is its part of the memory of the stage."""
    links = problem.different_links(chunks)
    room = problem.room(device) * share
    pays = problem.devices[device].communicates
    return Place(
        device=device,
        kind=problem.device_kinds[device],
        held=problem.held(chunk, chunks, microbatches),
        limit=_UNBOUNDED if math.isinf(room) else math.floor(room),
        # The first chunk receives nothing and the last one sends nothing, whatever their links are.
        link_in=links.index(problem.link(max(chunk - 1, 0))) if pays else -1,
        link_out=links.index(problem.link(min(chunk, max(chunks - 2, 0)))) if pays else -1,
    )


def _pool(problem: Problem, slowness: Sequence[float], chunks: int, microbatches: int) -> DeviceOrders:
    """All ways to take devices from a pool; equal devices are not distinguished."""
    groups: dict[tuple[int, float, bool], list[int]] = {}
    for index, (kind, device) in enumerate(zip(problem.device_kinds, problem.devices)):
        groups.setdefault((kind, device.memory, device.communicates), []).append(index)
    pools = list(groups.values())
    able = [1.0 / slowness[kind] for kind, _, _ in groups]
    size = math.prod(len(pool) + 1 for pool in pools)
    if size > _MOST_NODES:
        raise PartitionError(
            f"partition: a pool of {len(problem.devices)} devices of {len(pools)} kinds has {size} combinations; "
            f"expected at most {_MOST_NODES}: fix the order of the devices"
        )
    counts = sorted(
        (used for used in itertools.product(*(range(len(pool) + 1) for pool in pools)) if sum(used) <= chunks),
        key=lambda used: (sum(used), used),
    )
    number = {used: index for index, used in enumerate(counts)}
    nodes = []
    for used in counts:
        before = []
        for group, count in enumerate(used):
            if count:
                previous = (*used[:group], count - 1, *used[group + 1 :])
                place = _place(problem, sum(previous), pools[group][count - 1], chunks, microbatches)
                before.append((number[previous], place))
        left = [(able[group], len(pools[group]) - count) for group, count in enumerate(used)]
        nodes.append(
            DevicesUsed(
                before=tuple(before),
                used=sum(able[group] * count for group, count in enumerate(used)),
                left=_most_work(left, chunks - sum(used)),
                final=sum(used) == chunks or (problem.fewer and sum(used) > 0),
            )
        )
    return DeviceOrders(tuple(nodes), tuple(range(chunks)))


def _most_work(left: list[tuple[float, int]], places: int) -> float:
    """The most work that ``places`` of the remaining devices can do."""
    total = 0.0
    for able, count in sorted(left, reverse=True):
        total += able * min(count, places)
        places -= min(count, places)
    return total
