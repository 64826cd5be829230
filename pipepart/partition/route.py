"""The order in which chunks take devices: a line of places, or all ways through a pool of devices.

::

    fixed order          a pool of two GPUs and one host, any order, fewer allowed
    (0)-A->(1)-B->(2)    (0,0) -gpu-> (1,0) -gpu-> (2,0)
                           |host        |host        |host
                         (0,1) -gpu-> (1,1) -gpu-> (2,1)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipepart.errors import PartitionError
from pipepart.partition.instance import UNBOUNDED, Instance, Position, make_position
from pipepart.partition.problem import Problem

__all__ = ["Node", "Route", "make_route"]

_MOST_NODES = 4096


@dataclass(frozen=True)
class Node:
    """What was used so far: which nodes lead here, by giving the next chunk to which position."""

    before: tuple[tuple[int, Position], ...]
    used: float
    """Work (relative to the fastest device) that the devices used so far can do per tick of the bottleneck."""
    left: float
    """The same for the devices that are still to come."""
    final: bool


@dataclass(frozen=True)
class Route:
    """Nodes in an order in which every node comes after the nodes that lead to it; the first one is the start."""

    nodes: tuple[Node, ...]
    stages: tuple[int, ...]
    """Chunk -> the stage it is on (each on its own, where the devices are a pool)."""

    def without_memory(self) -> Route:
        """The same route where memory cannot matter: then positions differ by device and links only."""
        nodes = []
        for node in self.nodes:
            before = tuple((b, dataclasses.replace(p, held=0, limit=UNBOUNDED)) for b, p in node.before)
            nodes.append(dataclasses.replace(node, before=before))
        return Route(tuple(nodes), self.stages)

    @property
    def positions(self) -> tuple[Position, ...]:
        """Every position of the route."""
        return tuple(position for node in self.nodes for _, position in node.before)


def make_route(
    problem: Problem, instance: Instance, chunks: int, microbatches: int, *, shares: Sequence[float] | None = None
) -> Route:
    """The route of a problem. ``shares``: the part of its stage's memory that each chunk may use; all of it if left
    out, which is a relaxation where a stage has several chunks."""
    if problem.any_order:
        return _pool(problem, instance, chunks, microbatches)
    stages = problem.placement if problem.placement is not None else tuple(range(chunks))
    positions = []
    for chunk in range(chunks):
        share = 1.0 if shares is None else shares[chunk]
        positions.append(make_position(problem, chunk, problem.device(chunk), chunks, microbatches, share))
    able = [1.0 / instance.ratio[position.kind] for position in positions]
    nodes = [Node((), 0.0, sum(able), False)]
    for index, position in enumerate(positions):
        final = index == chunks - 1 or problem.fewer
        nodes.append(Node(((index, position),), sum(able[: index + 1]), sum(able[index + 1 :]), final))
    return Route(tuple(nodes), stages)


def _pool(problem: Problem, instance: Instance, chunks: int, microbatches: int) -> Route:
    """All ways to take devices from a pool, where equal devices are not told apart."""
    groups: dict[tuple[int, float, bool], list[int]] = {}
    for index, device in enumerate(problem.devices):
        kind = make_position(problem, 0, index, chunks, microbatches, 1.0).kind
        groups.setdefault((kind, device.memory, device.communicates), []).append(index)
    pools = list(groups.values())
    size = 1
    for pool in pools:
        size *= len(pool) + 1
    if size > _MOST_NODES:
        raise PartitionError(
            f"partition: a pool of {len(problem.devices)} devices of {len(pools)} kinds has {size} combinations; "
            f"expected at most {_MOST_NODES}: fix the order of the devices"
        )
    able = [1.0 / instance.ratio[make_position(problem, 0, pool[0], chunks, microbatches, 1.0).kind] for pool in pools]
    states = sorted(
        (used for used in itertools.product(*(range(len(pool) + 1) for pool in pools)) if sum(used) <= chunks),
        key=lambda used: (sum(used), used),
    )
    number = {used: index for index, used in enumerate(states)}
    nodes = []
    for used in states:
        before = []
        for group, count in enumerate(used):
            if count:
                previous = (*used[:group], count - 1, *used[group + 1 :])
                place = make_position(problem, sum(previous), pools[group][count - 1], chunks, microbatches, 1.0)
                before.append((number[previous], place))
        left = [(able[group], len(pools[group]) - count) for group, count in enumerate(used)]
        nodes.append(
            Node(
                before=tuple(before),
                used=sum(able[group] * count for group, count in enumerate(used)),
                left=_best(left, chunks - sum(used)),
                final=sum(used) == chunks or (problem.fewer and sum(used) > 0),
            )
        )
    return Route(tuple(nodes), tuple(range(chunks)))


def _best(left: list[tuple[float, int]], places: int) -> float:
    """The most work that ``places`` of the remaining devices can do."""
    total = 0.0
    for able, count in sorted(left, reverse=True):
        total += able * min(count, places)
        places -= min(count, places)
    return total
