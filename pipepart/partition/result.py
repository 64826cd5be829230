"""The answer of the partitioner, and the plain arithmetic that says what a given cut costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pipepart.partition.problem import Problem
from pipepart.partition.recompute import recomputed

_EQUAL = 1e-10
"""The search counts in whole ticks of about 2**-52 of the model: bound and bottleneck are equal up to this."""

__all__ = ["ChunkCost", "Partition", "chunk_costs", "fitting_recompute", "make_partition"]


@dataclass(frozen=True)
class Partition:
    """Which op is in which chunk, what each chunk then costs, and how far from the best possible this can be."""

    chunk_of: tuple[int, ...]
    """Op -> chunk; never decreasing along an edge."""
    loads: tuple[float, ...]
    """Seconds per chunk and micro-batch: compute and communication."""
    bottleneck: float
    """The largest load."""
    lower_bound: float
    """No partition into this many chunks has a smaller bottleneck."""
    gap: float
    """``(bottleneck - lower_bound) / lower_bound``: what could still be won, at most."""
    proved: bool
    """The bottleneck is the smallest possible one."""
    method: str
    """How it was found."""
    devices: tuple[int, ...]
    """Chunk -> index of its device in the problem."""
    recompute: tuple[str, ...]
    """Per chunk: ``none`` or ``full``."""
    traffic: tuple[float, ...]
    """Bytes per micro-batch that each chunk receives from earlier chunks, with the gradients that it sends back."""
    memory: tuple[float, ...]
    """Bytes that each chunk holds at most."""
    microbatches: int = 1
    seconds: float = field(default=0.0, compare=False)
    """Time spent on the search."""

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return len(self.loads)

    def ops_of(self, chunk: int) -> tuple[int, ...]:
        """The ops of a chunk in program order."""
        return tuple(op for op, c in enumerate(self.chunk_of) if c == chunk)

    @property
    def step_estimate(self) -> float:
        """``sum of loads + (m - 1) * largest load``: the surrogate of the step time that the search works with."""
        return math.fsum(self.loads) + (self.microbatches - 1) * self.bottleneck


@dataclass(frozen=True)
class ChunkCost:
    """One chunk, in seconds and bytes, before the choice whether it recomputes."""

    forward: float
    backward: float
    communication: float
    received_bytes: float
    """Activations that arrive from earlier chunks, per micro-batch."""
    traffic_bytes: float
    """The same with the gradients that go back."""
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
    """The costs of every chunk, straight from the definition."""
    chunks = len(devices)
    members: list[list[int]] = [[] for _ in range(chunks)]
    for op, chunk in enumerate(chunk_of):
        members[chunk].append(op)
    communication: list[list[float]] = [[] for _ in range(chunks)]
    received: list[list[float]] = [[] for _ in range(chunks)]
    traffic: list[list[float]] = [[] for _ in range(chunks)]
    for tensor in problem.traffic():
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


def fitting_recompute(
    problem: Problem, costs: Sequence[ChunkCost], devices: Sequence[int], microbatches: int
) -> tuple[str, ...]:
    """Per chunk the cheapest kind of recomputation with which its stage fits; the most saving one where none does."""
    chunks = len(devices)
    held = [problem.held(chunk, chunks, microbatches) for chunk in range(chunks)]
    kinds = [min(problem.recompute, key=("none", "full").index)] * chunks
    if "full" in problem.recompute and kinds[0] == "none":
        for stage in sorted({_stage(problem, chunk) for chunk in range(chunks)}):
            mine = [chunk for chunk in range(chunks) if _stage(problem, chunk) == stage]

            def memory(chunk: int, again: bool) -> float:
                return costs[chunk].memory(held[chunk], "full" if again else "none")

            def needed(again: Collection[int], mine: Sequence[int] = mine) -> float:
                return math.fsum(memory(chunk, chunk in again) for chunk in mine)

            chosen = recomputed(
                {chunk: costs[chunk].forward for chunk in mine},
                {chunk: memory(chunk, False) - memory(chunk, True) for chunk in mine},
                needed,
                problem.devices[devices[mine[0]]].memory - problem.reserved_bytes,
            )
            for chunk in chosen:
                kinds[chunk] = "full"
    return tuple(kinds)


def _stage(problem: Problem, chunk: int) -> int:
    return problem.placement[chunk] if problem.placement is not None else chunk


def make_partition(
    problem: Problem,
    chunk_of: Sequence[int],
    devices: Sequence[int],
    *,
    microbatches: int,
    lower_bound: float,
    method: str,
    seconds: float = 0.0,
) -> Partition:
    """A `Partition` with all its numbers, computed from the definition (and not from what a search believed)."""
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
        seconds=seconds,
    )
