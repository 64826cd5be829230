"""The figures of a split, put together from times, traffic, parameters and memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph
from pipepart.planning.chunk_traffic import OutputTraffic
from pipepart.planning.compute_times import ComputeTimes
from pipepart.planning.layout import Layout
from pipepart.planning.memory_model import MemoryModel
from pipepart.planning.parameter_uses import ParameterSizes, ParameterUses
from pipepart.planning.plan_parts import Tie
from pipepart.planning.priced import ChunkPrice, Priced

__all__ = ["ParameterSizes", "Pricing"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pricing:
    """The arithmetic for one graph on one mesh with one micro-batch size."""

    graph: OpGraph
    costs: tuple[OpCosts, ...]
    """One for all stages, or one per stage."""
    sizes: ParameterSizes
    layout: Layout
    optimizer_factor: float = 2.0
    frozen: Collection[str] = ()
    """Parameters without gradient and optimizer state."""

    @cached_property
    def times(self) -> ComputeTimes:
        return ComputeTimes(self.graph, self.costs)

    @cached_property
    def outputs(self) -> OutputTraffic:
        return OutputTraffic(self.graph, self.costs[0], self.layout)

    @cached_property
    def parameters(self) -> ParameterUses:
        return ParameterUses(self.graph, self.sizes, self.frozen)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(
            self.graph, self.costs[0], self.parameters, self.outputs, self.layout.memory, self.optimizer_factor
        )

    def price(self, chunk_of: Sequence[int] | Ints, placement: Sequence[int]) -> Priced:
        """The figures of one split."""
        chunk = np.asarray(chunk_of, dtype=np.int64)
        count = len(placement)
        times = self.times.of_chunks(chunk, placement)
        traffic = self.outputs.of_chunks(chunk, placement)
        handling = self.outputs.handling(placement, traffic)
        held = self.parameters.held(chunk, count)
        chunks = map(
            ChunkPrice,
            times.forward,
            times.backward_input,
            times.backward_weight,
            self.memory.kept(chunk, count, traffic),
            traffic.received(count),
            held.all.tolist(),
            [self.layout.reduce_seconds(s, size) for s, size in zip(placement, held.trained.tolist())],
            self.memory.scratch(chunk, placement, traffic),
            handling.forward,
            handling.backward,
        )
        return Priced(tuple(placement), tuple(chunks), traffic.pairs, self._ties(chunk, placement))

    def in_two_halves(self, priced: Priced, chunk_of: Sequence[int] | Ints) -> Priced:
        """The same split where backwards run in two halves: there is one action more for every backward."""
        split = self.times.split_backward(chunk_of, len(priced.placement))
        start = self.layout.handling.action
        chunks = (
            replace(
                price,
                backward_input=price.backward_input + more,
                backward_weight=max(0.0, price.backward_weight - less) + start,
            )
            for price, more, less in zip(priced.chunks, split.more_input, split.less_weight)
        )
        return replace(priced, chunks=tuple(chunks))

    def _ties(self, chunk: Ints, placement: Sequence[int]) -> tuple[Tie, ...]:
        """Trained parameters that lie on several stages, those of the same chunks together."""
        found = []
        for shared in self.parameters.shared(chunk):
            stages = sorted({placement[c] for c in shared.chunks})
            if len(stages) > 1:
                found.append(Tie(shared.chunks, int(shared.size), self.layout.tie_seconds(stages, shared.size)))
        return tuple(found)
