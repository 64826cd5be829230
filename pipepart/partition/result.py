"""Partitions: the result of the search, simple partitions for comparison, and the costs of chunks by definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipepart.partition.problem import RECOMPUTE, Problem
from pipepart.partition.units import unit_graph

__all__ = ["ChunkCost", "Partition", "baselines", "chunk_costs", "fitting_recompute", "make_partition", "recomputed"]

Floats = NDArray[np.float64]

_EQUAL = 1e-10
"""Relative difference up to which bound and bottleneck are equal: the search counts in ticks of 2**-52 of the model."""


@dataclass(frozen=True)
class Partition:
    """The chunk of each op, the costs of each chunk, and the distance from the optimum."""

    chunk_of: tuple[int, ...]
    """Chunk of each op; it never decreases along an edge."""
    loads: tuple[float, ...]
    """Seconds per chunk and micro-batch: compute and communication."""
    bottleneck: float
    """The largest load."""
    lower_bound: float
    """Lower bound of the bottleneck of every partition into this many chunks."""
    gap: float
    """``(bottleneck - lower_bound) / lower_bound``: the most that a better partition could save."""
    proved: bool
    """Whether the bottleneck is proved to be the smallest possible one."""
    method: str
    """Name of the search that found it."""
    devices: tuple[int, ...]
    """Index of the device of each chunk in the problem."""
    recompute: tuple[str, ...]
    """Recomputation of each chunk: ``none`` or ``full``."""
    traffic: tuple[float, ...]
    """Bytes per micro-batch that each chunk receives from earlier chunks, with the gradients that it sends back."""
    memory: tuple[float, ...]
    """Bytes that each chunk holds at most."""
    microbatches: int = 1
    seconds: float = field(default=0.0, compare=False)
    """Time spent on the search."""

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.loads)

    def ops_of(self, chunk: int) -> tuple[int, ...]:
        """The ops of a chunk in program order."""
        return tuple(op for op, c in enumerate(self.chunk_of) if c == chunk)


@dataclass(frozen=True)
class ChunkCost:
    """Seconds and bytes of one chunk, before the choice whether it recomputes."""

    forward: float
    backward: float
    communication: float
    received_bytes: float
    """Activations that arrive from earlier chunks, per micro-batch."""
    traffic_bytes: float
    """Activations that arrive and the gradients that go back for them."""
    state_bytes: float
    saved_bytes: float

    def load(self, overlap: bool, recompute: str) -> float:
        """Seconds per micro-batch."""
        compute = self.forward + self.backward + (self.forward if recompute == "full" else 0.0)
        return max(compute, self.communication) if overlap else compute + self.communication

    def memory(self, held: int, recompute: str) -> float:
        """Bytes held with ``held`` micro-batches in flight."""
        if recompute == "full" and held:
            return self.state_bytes + held * self.received_bytes + self.saved_bytes
        return self.state_bytes + held * self.saved_bytes


def chunk_costs(problem: Problem, chunk_of: Sequence[int], devices: Sequence[int]) -> tuple[ChunkCost, ...]:
    """The costs of every chunk, by definition."""
    chunks = len(devices)
    members: list[list[int]] = [[] for _ in range(chunks)]
    for op, chunk in enumerate(chunk_of):
        members[chunk].append(op)
    communication: list[list[float]] = [[] for _ in range(chunks)]
    received: list[list[float]] = [[] for _ in range(chunks)]
    traffic: list[list[float]] = [[] for _ in range(chunks)]
    for tensor in problem.traffic:
        users = sorted({chunk_of[op] for op in tensor.ops})
        if len(users) < 2 or tensor.size + tensor.gradient <= 0:
            continue
        for rank, chunk in enumerate(users):
            link = problem.link(chunk - 1) if rank else problem.link(chunk)
            if problem.devices[devices[chunk]].communicates:
                communication[chunk].append(link.seconds(tensor.size) + link.seconds(tensor.gradient))
            if rank:
                received[chunk].append(tensor.size)
                traffic[chunk].append(tensor.size + tensor.gradient)
    costs = []
    for chunk in range(chunks):
        forward, backward = problem.seconds(devices[chunk])
        ops = members[chunk]
        costs.append(
            ChunkCost(
                forward=math.fsum(forward[ops]),
                backward=math.fsum(backward[ops]),
                communication=math.fsum(communication[chunk]),
                received_bytes=math.fsum(received[chunk]),
                traffic_bytes=math.fsum(traffic[chunk]),
                state_bytes=math.fsum(problem.parameter_bytes[ops]) * problem.state_factor,
                saved_bytes=math.fsum(problem.saved_bytes[ops]),
            )
        )
    return tuple(costs)


def recomputed(
    forward: Mapping[int, float],
    saving: Mapping[int, float],
    needed: Callable[[Collection[int]], float],
    limit: float,
) -> set[int]:
    """The chunks of one stage that recompute; they share its memory.

    They change to recomputation one by one, the one that saves most per second of extra work first, until the stage
    fits. ``forward`` holds the seconds of extra work of each chunk, ``saving`` the bytes that each saves alone;
    ``needed`` returns the bytes of the stage if some of its chunks recompute.
    """
    chosen: set[int] = set()
    for chunk in sorted(forward, key=lambda c: (forward[c] / max(saving[c], 1e-30), c)):
        if needed(chosen) <= limit:
            break
        if saving[chunk] > 0:
            chosen.add(chunk)
    return chosen


def fitting_recompute(
    problem: Problem, costs: Sequence[ChunkCost], devices: Sequence[int], microbatches: int
) -> tuple[str, ...]:
    """The cheapest recomputation of each chunk with which its stage fits, or comes nearest to it."""
    chunks = range(len(devices))
    if "full" not in problem.recompute or "none" not in problem.recompute:
        return (problem.recompute[0],) * len(devices)
    memory = {
        kind: [cost.memory(problem.held(chunk, len(devices), microbatches), kind) for chunk, cost in enumerate(costs)]
        for kind in RECOMPUTE
    }
    chosen: set[int] = set()
    for stage in sorted({problem.stage(chunk) for chunk in chunks}):
        mine = [chunk for chunk in chunks if problem.stage(chunk) == stage]

        def needed(again: Collection[int], mine: Sequence[int] = mine) -> float:
            return math.fsum(memory["full" if chunk in again else "none"][chunk] for chunk in mine)

        chosen |= recomputed(
            {chunk: costs[chunk].forward for chunk in mine},
            {chunk: memory["none"][chunk] - memory["full"][chunk] for chunk in mine},
            needed,
            problem.room(devices[mine[0]]),
        )
    return tuple("full" if chunk in chosen else "none" for chunk in chunks)


def make_partition(
    problem: Problem,
    chunk_of: Sequence[int],
    devices: Sequence[int],
    *,
    microbatches: int,
    method: str,
    lower_bound: float = 0.0,
) -> Partition:
    """A `Partition` with all its numbers, computed from the definition and not from the numbers of a search."""
    costs = chunk_costs(problem, chunk_of, devices)
    recompute = fitting_recompute(problem, costs, devices, microbatches)
    loads = tuple(cost.load(problem.overlap, kind) for cost, kind in zip(costs, recompute))
    bottleneck = max(loads)
    bound = min(lower_bound, bottleneck)
    if bottleneck - bound <= _EQUAL * bottleneck:
        bound = bottleneck
    return Partition(
        chunk_of=tuple(int(chunk) for chunk in chunk_of),
        loads=loads,
        bottleneck=bottleneck,
        lower_bound=bound,
        gap=(bottleneck - bound) / bound if bound > 0 else 0.0,
        proved=bound == bottleneck,
        method=method,
        devices=tuple(int(device) for device in devices),
        recompute=recompute,
        traffic=tuple(cost.traffic_bytes for cost in costs),
        memory=tuple(
            cost.memory(problem.held(chunk, len(devices), microbatches), kind)
            for chunk, (cost, kind) in enumerate(zip(costs, recompute))
        ),
        microbatches=microbatches,
    )


def baselines(problem: Problem, chunks: int, *, microbatches: int = 1) -> Mapping[str, Partition]:
    """Simple partitions to compare with: slices of the program order, without regard to traffic or memory.

    Chunks have the same number of ops (``even``), the same parameter bytes (``parameters``), or the same forward time,
    the cost nearest to FLOPs (``flops``); ``greedy`` fills a chunk up to the mean time, then starts the next.
    """
    problem.fits_chunks(chunks)
    graph = unit_graph(problem)
    graph.require(chunks)
    weights = {
        "even": graph.sums(np.ones(problem.ops)),
        "parameters": graph.sums(problem.parameter_bytes),
        "flops": graph.sums(problem.forward),
    }
    found = {name: _proportional(weight, chunks) for name, weight in weights.items()}
    found["greedy"] = _greedy(graph.sums(problem.forward + problem.backward), chunks)
    devices = [chunk if problem.any_order else problem.device(chunk) for chunk in range(chunks)]
    partitions = {}
    for name, cuts in found.items():
        chunk_of = np.repeat(np.arange(chunks), np.diff(cuts))
        partitions[name] = make_partition(
            problem, chunk_of[list(graph.unit_of)].tolist(), devices, microbatches=microbatches, method=name
        )
    return partitions


def _proportional(weight: Floats, chunks: int) -> list[int]:
    """Cuts where the running sum comes nearest to each multiple of the mean, with no empty chunk."""
    sums = np.concatenate(([0.0], np.cumsum(weight)))
    cuts = [0]
    for chunk in range(1, chunks):
        goal = sums[-1] * chunk / chunks
        first, last = cuts[-1] + 1, len(weight) - (chunks - chunk)
        cuts.append(first + int(np.argmin(np.abs(sums[first : last + 1] - goal))))
    return [*cuts, len(weight)]


def _greedy(weight: Floats, chunks: int) -> list[int]:
    """Cuts where a chunk would pass the mean of the weight that is left for it and the chunks after it."""
    n = len(weight)
    cuts = [0]
    for chunk in range(chunks - 1):
        goal = float(weight[cuts[-1] :].sum()) / (chunks - chunk)
        end = cuts[-1] + 1
        filled = float(weight[cuts[-1]])
        while end < n - (chunks - chunk - 1) and filled + float(weight[end]) <= goal:
            filled += float(weight[end])
            end += 1
        cuts.append(end)
    return [*cuts, n]
