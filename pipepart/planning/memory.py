"""Parameters and memory: the parameters of each chunk, the memory of every stage, and recomputation that makes it fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph
from pipepart.partition.result import recomputed
from pipepart.planning.chunks import Priced, StageMemory
from pipepart.planning.sync_memory import bytes_at_work
from pipepart.planning.traffic import ChunkTraffic, OutputTraffic
from pipepart.schedule import Schedule

__all__ = ["FittingRecompute", "MemoryModel", "ParameterSize", "ParameterUses", "chunk_peaks", "parameter_sizes"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_AT_WORK = 3
"""Tensors of the size of an op's output that exist while its backward runs: two gradients and one in between."""
_AT_CONVOLUTION = 5
"""Tensors of the size of the output that exist during the backward of an op that changes layouts first, as measured."""
_EARLY = 2
"""Messages that a stage receives before they are needed."""


@dataclass(frozen=True)
class ParameterSize:
    """The size of one parameter."""

    elements: int
    bytes: int


def parameter_sizes(root: nn.Module) -> dict[str, ParameterSize]:
    """Return the sizes of all parameters of a model by name."""
    return {name: ParameterSize(p.numel(), p.numel() * p.element_size()) for name, p in root.named_parameters()}


@dataclass(frozen=True, eq=False)
class HeldParameters:
    """Bytes of the parameters of each part, and of those that are trained."""

    all: Floats
    trained: Floats


@dataclass(frozen=True)
class SharedParameters:
    """Trained parameters that the same chunks use."""

    chunks: tuple[int, ...]
    size: float
    """Bytes."""


@dataclass(frozen=True, eq=False)
class ParameterUses:
    """The parameters that the ops of one graph use."""

    graph: OpGraph
    sizes: Mapping[str, ParameterSize]
    frozen: Collection[str] = ()
    """Parameters without gradient and optimizer state."""

    def held(self, part_of: Ints, count: int) -> HeldParameters:
        """Return the parameters of each part (chunk or stage); a parameter counts once in each."""
        op, parameter = self._uses
        if not len(op):
            return HeldParameters(np.zeros(count), np.zeros(count))
        keys = np.unique(part_of[op] * len(self.sizes) + parameter)
        part, which = keys // len(self.sizes), keys % len(self.sizes)

        def total(values: Floats) -> Floats:
            return np.bincount(part, weights=values[which], minlength=count).astype(np.float64)

        return HeldParameters(total(self._bytes), total(self._trained_bytes))

    def shared(self, chunk: Ints) -> tuple[SharedParameters, ...]:
        """Return trained parameters that several ops use, grouped by the chunks of these ops."""
        op, parameter = self._uses
        found: dict[tuple[int, ...], float] = {}
        for which in self._used_often:
            chunks = tuple(sorted(set(chunk[op[parameter == which]].tolist())))
            found[chunks] = found.get(chunks, 0.0) + float(self._trained_bytes[which])
        return tuple(SharedParameters(chunks, size) for chunks, size in sorted(found.items()))

    @cached_property
    def _uses(self) -> tuple[Ints, Ints]:
        """The op and the parameter of every use."""
        number = {name: i for i, name in enumerate(self.sizes)}
        uses = [(i, number[name]) for i, op in enumerate(self.graph.ops) for name in op.parameters]
        table = np.array(uses, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    @cached_property
    def _bytes(self) -> Floats:
        return np.array([float(size.bytes) for size in self.sizes.values()])

    @cached_property
    def _trained_bytes(self) -> Floats:
        """Bytes of every parameter that is trained, and 0 for the others."""
        return np.array([0.0 if name in self.frozen else float(size.bytes) for name, size in self.sizes.items()])

    @cached_property
    def _used_often(self) -> list[int]:
        """Trained parameters that several ops use."""
        uses = np.bincount(self._uses[1], minlength=len(self.sizes))
        return [int(which) for which in np.flatnonzero(uses > 1) if self._trained_bytes[which]]


@dataclass(frozen=True)
class FittingRecompute:
    """The chunks that recompute so that every stage fits."""

    recompute: tuple[bool, ...]
    over: float
    """Bytes by which the worst stage exceeds its memory; 0: all stages fit."""
    worst: int
    """The stage that exceeds its memory most."""


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """Bytes of the ops and parameters of one graph, summed by chunk and stage."""

    graph: OpGraph
    costs: OpCosts
    parameters: ParameterUses
    outputs: OutputTraffic
    limits: tuple[float, ...]
    """Bytes that each stage may use."""
    optimizer_factor: float
    weight_share: float = 1.0
    """The share of the parameters of a stage that a rank holds, apart from those of chunks at work."""

    def kept(self, chunk: Ints, count: int, traffic: ChunkTraffic) -> list[float]:
        """Return the bytes that one micro-batch keeps in each chunk between its forward and its backward.

        These are the tensors that autograd saves, the outputs that wait for their gradient, and the inputs that will
        have one. A tensor that is also among the saved ones counts once.
        """
        kept: list[float] = np.bincount(chunk, weights=self._saved, minlength=count).tolist()
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
        return kept

    def scratch(self, chunk: Ints, placement: Sequence[int], traffic: ChunkTraffic) -> tuple[float, ...]:
        """Return the bytes that each chunk needs for a moment: a few of its largest tensors, and early messages."""
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
        """Return the memory of each stage at the peak of the schedule."""
        stage_of = np.asarray(priced.placement, dtype=np.int64)[np.asarray(chunk_of, dtype=np.int64)]
        held = self.parameters.held(stage_of, schedule.stages)
        again = {chunk for chunk, recomputes in enumerate(recompute) if recomputes}
        weights = self._weights(np.asarray(chunk_of, dtype=np.int64), priced, held.all)
        return tuple(
            StageMemory(
                weights=int(weights[stage]),
                gradients=int(held.trained[stage]),
                optimizer=int(held.trained[stage] * self.optimizer_factor),
                activations=_activations(priced, schedule, stage, again),
                scratch=math.ceil(max(priced.scratch_bytes[c] for c in priced.of_stage(stage))),
            )
            for stage in range(schedule.stages)
        )

    def _weights(self, chunk: Ints, priced: Priced, held: Floats) -> Sequence[float]:
        """Return the bytes of the parameters that each stage holds at once."""
        own = [float(size) for size in held]
        if self.weight_share == 1.0:
            return own
        parts = self.parameters.held(chunk, len(priced.placement)).all
        return [
            bytes_at_work(size, [float(parts[c]) for c in priced.of_stage(stage)], self.weight_share)
            for stage, size in enumerate(own)
        ]

    def fitting_recompute(
        self, chunk_of: Sequence[int] | Ints, priced: Priced, schedule: Schedule, wish: bool | str
    ) -> FittingRecompute:
        """Choose the chunks that recompute so that every stage fits, or comes nearest to it; `wish` may fix them."""
        again = {chunk for chunk in range(len(priced.placement)) if wish is True}
        memory = self.of_stages(chunk_of, priced, schedule, [wish is True] * len(priced.placement))
        over = [m.total - limit for m, limit in zip(memory, self.limits)]
        if wish == "auto" and max(over) > 0:
            in_flight = chunk_peaks(schedule)
            for stage in [s for s, bytes_over in enumerate(over) if bytes_over > 0]:
                mine = {c: priced.chunks[c] for c in priced.of_stage(stage)}
                # A chunk that recomputes holds its saved tensors again for one micro-batch.
                saving = {
                    c: in_flight[c] * (one.saved_bytes - one.received_bytes) - one.saved_bytes
                    for c, one in mine.items()
                }
                fixed = memory[stage].total - memory[stage].activations

                def needed(chunks: Collection[int], stage: int = stage, fixed: int = fixed) -> float:
                    return fixed + _activations(priced, schedule, stage, chunks)

                chosen = recomputed({c: one.forward for c, one in mine.items()}, saving, needed, self.limits[stage])
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
        """Bytes that exist while each op runs."""
        convolutions = ["conv" in f"{op.module_class} {op.target}".lower() for op in self.graph.ops]
        return np.where(convolutions, _AT_CONVOLUTION, _AT_WORK) * np.asarray(self.costs.output_bytes, dtype=np.float64)


def _activations(priced: Priced, schedule: Schedule, stage: int, recompute: Collection[int]) -> int:
    """Return the largest number of bytes that a stage keeps for backward in a step, if these chunks recompute.

    A chunk that recomputes holds its saved tensors again for one micro-batch. Between the two halves of a split backward
    all of them are assumed to stay.
    """
    size = [chunk.held_bytes(index in recompute) for index, chunk in enumerate(priced.chunks)]
    level = peak = 0
    for action in schedule.actions[stage]:
        if action.kind == "F":
            level += size[action.chunk]
            peak = max(peak, level)
        elif action.kind in ("B", "W"):
            level -= size[action.chunk]
    return peak + max((priced.chunks[c].saved_bytes for c in priced.of_stage(stage) if c in recompute), default=0)


def chunk_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Return for each chunk the largest number of micro-batches whose activations it holds at once."""
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
