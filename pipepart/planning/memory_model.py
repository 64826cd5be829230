"""The memory of every stage at the peak of a schedule, and the recomputation that makes it fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph
from pipepart.partition.result import recomputed
from pipepart.planning.chunk_traffic import ChunkTraffic, OutputTraffic
from pipepart.planning.parameter_uses import ParameterUses
from pipepart.planning.plan_parts import StageMemory
from pipepart.planning.priced import Priced
from pipepart.schedule import Schedule

__all__ = ["FittingRecompute", "MemoryModel", "chunk_peaks"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_AT_WORK = 3
"""Tensors of the size of an op's output that exist for a moment while its backward runs: a gradient that comes, one that
goes, and one in between."""
_AT_CONVOLUTION = 5
"""The same where an op lays out its tensors anew before it computes, as measured."""
_EARLY = 2
"""Messages that a stage takes in before they are needed."""


@dataclass(frozen=True)
class FittingRecompute:
    """The chunks that recompute so that every stage fits."""

    recompute: tuple[bool, ...]
    over: float
    """Bytes by which the worst stage does not fit; 0: all fit."""
    worst: int
    """That stage."""


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """Bytes of the ops and parameters of one graph, added up by chunk and stage."""

    graph: OpGraph
    costs: OpCosts
    parameters: ParameterUses
    outputs: OutputTraffic
    limits: tuple[float, ...]
    """Bytes that each stage may use."""
    optimizer_factor: float

    def kept(self, chunk: Ints, count: int, traffic: ChunkTraffic) -> tuple[float, ...]:
        """Bytes that one micro-batch leaves in each chunk between its forward and its backward.

        Besides what autograd saves these are the outputs that wait for their gradient, and the inputs that will have
        one. Where the same tensor is among the saved ones it counts once.
        """
        kept = np.bincount(chunk, weights=self._saved, minlength=count).tolist()
        waiting, all_savers = set(), self.costs.savers
        for op, target in traffic.sent:
            savers = all_savers[op] if all_savers else ()
            home, size = int(chunk[op]), float(self.outputs.sent[op])
            saving = {int(chunk[saver]) for saver in savers}
            waits = self.graph.ops[op].requires_grad
            if waits and op not in waiting and home not in saving:
                waiting.add(op)
                kept[home] += size
            counted = bool(savers) and int(chunk[savers[0]]) == target
            if all_savers and (waits or target in saving) and not counted:
                kept[target] += size
        return tuple(kept)

    def scratch(self, chunk: Ints, placement: Sequence[int], traffic: ChunkTraffic) -> tuple[float, ...]:
        """Bytes that a chunk needs for a moment: some tensors of the largest size, and messages that came early."""
        largest = np.zeros(len(placement))
        np.maximum.at(largest, chunk, self._at_work)
        early = [0.0] * len(placement)
        for pair in traffic.pairs:
            if placement[pair.source] != placement[pair.target]:
                early[pair.target] = max(early[pair.target], pair.forward_bytes)
                early[pair.source] = max(early[pair.source], pair.backward_bytes)
        return tuple(float(size) + _EARLY * message for size, message in zip(largest, early))

    def of_stages(
        self, chunk_of: Sequence[int] | Ints, priced: Priced, schedule: Schedule, recompute: Sequence[bool]
    ) -> tuple[StageMemory, ...]:
        """The memory of each stage at the peak of the schedule."""
        stage_of = np.asarray(priced.placement, dtype=np.int64)[np.asarray(chunk_of, dtype=np.int64)]
        held = self.parameters.held(stage_of, schedule.stages)
        again = {chunk for chunk, recomputes in enumerate(recompute) if recomputes}
        return tuple(
            StageMemory(
                weights=int(held.all[stage]),
                gradients=int(held.trained[stage]),
                optimizer=int(held.trained[stage] * self.optimizer_factor),
                activations=_activations(priced, schedule, stage, again),
                scratch=math.ceil(max(priced.chunks[c].scratch_bytes for c in priced.of_stage(stage))),
            )
            for stage in range(schedule.stages)
        )

    def fitting_recompute(
        self, chunk_of: Sequence[int] | Ints, priced: Priced, schedule: Schedule, wish: bool | str
    ) -> FittingRecompute:
        """The recomputation with which every stage fits, where ``wish`` leaves it open, or comes nearest to it."""
        again = {chunk for chunk in range(len(priced.placement)) if wish is True}
        memory = self.of_stages(chunk_of, priced, schedule, [wish is True] * len(priced.placement))
        over = [m.total - limit for m, limit in zip(memory, self.limits)]
        if wish == "auto" and max(over) > 0:
            in_flight = chunk_peaks(schedule)
            for stage in [s for s, bytes_over in enumerate(over) if bytes_over > 0]:
                mine = priced.of_stage(stage)
                prices = {c: priced.chunks[c] for c in mine}
                # A chunk that recomputes holds all that it saves again, for the micro-batch that it is at.
                saving = {
                    c: in_flight[c] * (one.saved_bytes - one.received_bytes) - one.saved_bytes
                    for c, one in prices.items()
                }
                fixed = memory[stage].total - memory[stage].activations

                def needed(chunks: Collection[int], stage: int = stage, fixed: int = fixed) -> float:
                    return fixed + _activations(priced, schedule, stage, chunks)

                chosen = recomputed({c: one.forward for c, one in prices.items()}, saving, needed, self.limits[stage])
                over[stage] = needed(chosen) - self.limits[stage]
                again |= chosen
        worst = max(range(len(over)), key=over.__getitem__)
        return FittingRecompute(
            tuple(chunk in again for chunk in range(len(priced.placement))), max(0.0, over[worst]), worst
        )

    @cached_property
    def _saved(self) -> Floats:
        return np.asarray(self.costs.saved_bytes, dtype=np.float64)

    @cached_property
    def _at_work(self) -> Floats:
        """Bytes that come and go while each op runs."""
        convolutions = ["conv" in f"{op.module_class} {op.target}".lower() for op in self.graph.ops]
        return np.where(convolutions, _AT_CONVOLUTION, _AT_WORK) * np.asarray(self.costs.output_bytes, dtype=np.float64)


def _activations(priced: Priced, schedule: Schedule, stage: int, recompute: Collection[int]) -> int:
    """Bytes that a stage keeps for backward at its peak, if these chunks recompute.

    A chunk that recomputes holds all that it saves again, for the micro-batch that it is at. Between the two halves of
    a split backward everything is taken to stay.
    """
    size = [price.held_bytes(chunk in recompute) for chunk, price in enumerate(priced.chunks)]
    level = peak = 0.0
    for action in schedule.actions[stage]:
        if action.kind == "F":
            level += size[action.chunk]
            peak = max(peak, level)
        elif action.kind in ("B", "W"):
            level -= size[action.chunk]
    mine = priced.of_stage(stage)
    return math.ceil(peak + max((priced.chunks[c].saved_bytes for c in mine if c in recompute), default=0.0))


def chunk_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Per chunk: the most micro-batches whose activations it holds at once."""
    live = [0] * schedule.chunks
    peak = [0] * schedule.chunks
    for actions in schedule.actions:
        for action in actions:
            if action.kind == "F":
                live[action.chunk] += 1
                peak[action.chunk] = max(peak[action.chunk], live[action.chunk])
            elif action.kind in ("B", "W"):
                live[action.chunk] -= 1
    return tuple(peak)
