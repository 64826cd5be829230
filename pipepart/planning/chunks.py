"""The parts of a split: its chunks with their costs, the traffic between them, and the memory of their stages.

A `ChunkPlan` is the one description of a chunk, from pricing to the plan file. `ChunkCosts` of the schedule room holds the
same seconds by column, since the simulator does not know parameters and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipepart.schedule import ChunkCosts, Edges

__all__ = ["ChunkPlan", "Priced", "StageMemory", "Tie", "Traffic", "simulator_costs", "simulator_edges"]


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk: its content, and the cost of one micro-batch on it."""

    stage: int
    ops: int
    first: str
    """Module path of the first op in a module."""
    last: str
    """Module path of the last op in a module."""
    parameters: int
    parameter_bytes: int
    saved_bytes: int
    """Bytes that one micro-batch keeps from its forward to its backward."""
    forward: float
    backward_input: float
    backward_weight: float
    received_bytes: int = 0
    """Bytes from earlier chunks for one micro-batch; a chunk that recomputes keeps only these."""
    reduce: float = 0.0
    """Seconds to sum its gradients over the replicas, once per step."""
    handling_forward: float = 0.0
    """Host overhead of each forward, in seconds: receiving, sending, starting it."""
    handling_backward: float = 0.0
    """Host overhead of each backward, in seconds."""

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward_input + self.backward_weight

    def held_bytes(self, recompute: bool) -> int:
        """Return the bytes of a micro-batch in flight: a chunk that recomputes keeps its inputs only."""
        return self.received_bytes if recompute else self.saved_bytes


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage at the peak of the step, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Tensors saved for the backward of all micro-batches in flight, and those that a chunk recomputes."""
    scratch: int = 0
    """Tensors that exist while an op runs, and messages that arrive before their use."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.scratch


@dataclass(frozen=True)
class Traffic:
    """The messages of one micro-batch from one chunk to another, with their time on the link."""

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    forward_seconds: float
    backward_seconds: float

    @property
    def skip(self) -> bool:
        return self.target > self.source + 1


@dataclass(frozen=True)
class Tie:
    """Parameters that several stages use: their gradients are summed at the end of every step."""

    chunks: tuple[int, ...]
    size: int
    """Bytes."""
    seconds: float


@dataclass(frozen=True, eq=False)
class Priced:
    """The costs of one split on one placement, before recomputation is chosen."""

    placement: tuple[int, ...]
    """Chunk -> stage."""
    chunks: tuple[ChunkPlan, ...]
    """The chunks, without module paths and numbers of parameters, which only a plan needs."""
    scratch_bytes: tuple[float, ...]
    """Per chunk: bytes that exist while its ops run."""
    traffic: tuple[Traffic, ...]
    ties: tuple[Tie, ...] = ()

    @cached_property
    def edges(self) -> Edges:
        return simulator_edges(len(self.placement), self.traffic, self.ties)

    def costs(self, recompute: Sequence[bool]) -> ChunkCosts:
        """Return the costs for the simulator."""
        return simulator_costs(self.chunks, self.traffic, self.ties, recompute)

    def of_stage(self, stage: int) -> list[int]:
        """Return the chunks of a stage."""
        return [chunk for chunk, home in enumerate(self.placement) if home == stage]


def simulator_costs(
    chunks: Sequence[ChunkPlan], traffic: Sequence[Traffic], ties: Sequence[Tie], recompute: Sequence[bool]
) -> ChunkCosts:
    """Return the costs of chunks, some of which recompute, for the simulator."""
    return ChunkCosts(
        forward=tuple(chunk.forward for chunk in chunks),
        backward_input=tuple(chunk.backward_input for chunk in chunks),
        backward_weight=tuple(chunk.backward_weight for chunk in chunks),
        recompute=tuple(chunk.forward if again else 0.0 for chunk, again in zip(chunks, recompute)),
        activation=tuple(float(chunk.held_bytes(again)) for chunk, again in zip(chunks, recompute)),
        send_forward={(t.source, t.target): t.forward_seconds for t in traffic},
        send_backward={(t.source, t.target): t.backward_seconds for t in traffic if t.backward_bytes},
        handling_forward=tuple(chunk.handling_forward for chunk in chunks),
        handling_backward=tuple(chunk.handling_backward for chunk in chunks),
        reduce=tuple(chunk.reduce for chunk in chunks),
        reduce_tied=tuple(tie.seconds for tie in ties),
    )


def simulator_edges(chunks: int, traffic: Sequence[Traffic], ties: Sequence[Tie]) -> Edges:
    """Return the edges between chunks for the simulator."""
    pairs = [(t.source, t.target) for t in traffic]
    back = [(t.source, t.target) for t in traffic if t.backward_bytes]
    return Edges.of(chunks, pairs, back, [tie.chunks for tie in ties])
