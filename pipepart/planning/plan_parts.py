"""The parts of a plan, and what the simulator takes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipepart.schedule import ChunkCosts, Edges

__all__ = ["ChunkFigures", "ChunkPlan", "StageMemory", "Tie", "Traffic", "simulator_costs", "simulator_edges"]


class ChunkFigures(Protocol):
    """The figures of one chunk that the simulator takes: seconds and bytes of one micro-batch."""

    @property
    def forward(self) -> float: ...
    @property
    def backward_input(self) -> float: ...
    @property
    def backward_weight(self) -> float: ...
    @property
    def saved_bytes(self) -> float: ...
    @property
    def received_bytes(self) -> float: ...
    @property
    def reduce(self) -> float: ...
    @property
    def handling_forward(self) -> float: ...
    @property
    def handling_backward(self) -> float: ...


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk: what it holds and what one micro-batch costs on it."""

    stage: int
    ops: int
    first: str
    """Module path of its first op that has one."""
    last: str
    parameters: int
    parameter_bytes: int
    saved_bytes: int
    """Kept for the backward of one micro-batch."""
    forward: float
    backward_input: float
    backward_weight: float
    received_bytes: int = 0
    """What arrives from earlier chunks for one micro-batch: all that a chunk that recomputes keeps of it."""
    reduce: float = 0.0
    """Seconds of summing its gradients over the replicas, once per step."""
    handling_forward: float = 0.0
    """Seconds for which each forward keeps its device besides computing: receiving, sending, starting it."""
    handling_backward: float = 0.0

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one stage holds at the peak of the step, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Saved for the backward of all micro-batches in flight, and what a chunk that recomputes makes again."""
    scratch: int = 0
    """What comes and goes while ops run, and messages that arrive ahead of their use."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.scratch


@dataclass(frozen=True)
class Traffic:
    """What one micro-batch sends from one chunk to another, and how long that takes."""

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


def simulator_costs(
    chunks: Sequence[ChunkFigures], traffic: Sequence[Traffic], ties: Sequence[Tie], recompute: Sequence[bool]
) -> ChunkCosts:
    """The costs of chunks, some of which recompute, as the simulator takes them."""
    return ChunkCosts(
        forward=tuple(chunk.forward for chunk in chunks),
        backward_input=tuple(chunk.backward_input for chunk in chunks),
        backward_weight=tuple(chunk.backward_weight for chunk in chunks),
        recompute=tuple(chunk.forward if again else 0.0 for chunk, again in zip(chunks, recompute)),
        activation=tuple(
            float(chunk.received_bytes if again else chunk.saved_bytes) for chunk, again in zip(chunks, recompute)
        ),
        send_forward={(t.source, t.target): t.forward_seconds for t in traffic},
        send_backward={(t.source, t.target): t.backward_seconds for t in traffic if t.backward_bytes},
        handling_forward=tuple(chunk.handling_forward for chunk in chunks),
        handling_backward=tuple(chunk.handling_backward for chunk in chunks),
        reduce=tuple(chunk.reduce for chunk in chunks),
        reduce_tied=tuple(tie.seconds for tie in ties),
    )


def simulator_edges(chunks: int, traffic: Sequence[Traffic], ties: Sequence[Tie]) -> Edges:
    """Who waits for whom among so many chunks."""
    pairs = [(t.source, t.target) for t in traffic]
    back = [(t.source, t.target) for t in traffic if t.backward_bytes]
    return Edges.of(chunks, pairs, back, [tie.chunks for tie in ties])
