"""A split with its figures: the result of pricing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipepart.planning.plan_parts import Tie, Traffic, simulator_costs, simulator_edges
from pipepart.schedule import ChunkCosts, Edges

__all__ = ["ChunkPrice", "Priced"]


@dataclass(frozen=True)
class ChunkPrice:
    """One chunk: seconds and bytes of one micro-batch on it."""

    forward: float
    backward_input: float
    backward_weight: float
    saved_bytes: float
    """Kept from the forward of a micro-batch to its backward."""
    received_bytes: float
    parameter_bytes: float
    reduce: float
    scratch_bytes: float
    """Bytes that come and go while the ops of the chunk run."""
    handling_forward: float = 0.0
    handling_backward: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward_input + self.backward_weight

    def held_bytes(self, recompute: bool) -> float:
        """Bytes that a micro-batch in flight keeps: a chunk that recomputes keeps its inputs only."""
        return self.received_bytes if recompute else self.saved_bytes


@dataclass(frozen=True, eq=False)
class Priced:
    """One split on one placement, before the choice of what is recomputed."""

    placement: tuple[int, ...]
    chunks: tuple[ChunkPrice, ...]
    traffic: tuple[Traffic, ...]
    ties: tuple[Tie, ...] = ()

    @cached_property
    def edges(self) -> Edges:
        return simulator_edges(len(self.placement), self.traffic, self.ties)

    def costs(self, recompute: Sequence[bool]) -> ChunkCosts:
        """The costs that the simulator takes."""
        return simulator_costs(self.chunks, self.traffic, self.ties, recompute)

    def of_stage(self, stage: int) -> list[int]:
        """The chunks of a stage."""
        return [chunk for chunk, home in enumerate(self.placement) if home == stage]
