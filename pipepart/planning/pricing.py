"""The costs of a split, from the costs of ops: compute times, traffic, parameters and memory of its chunks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipepart.cost import OpCosts
from pipepart.cost.op_costs import SPLIT_LAYERS
from pipepart.graph import OpGraph
from pipepart.planning.chunks import ChunkPlan, Priced, Tie
from pipepart.planning.layout import Layout
from pipepart.planning.memory import MemoryModel, ParameterSize, ParameterUses
from pipepart.planning.traffic import OutputTraffic

__all__ = ["LeastWork", "Pricing"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SPLIT_LAYERS = frozenset(layer.__name__ for layer in SPLIT_LAYERS)


@dataclass(frozen=True)
class LeastWork:
    """Seconds of one micro-batch that no split can avoid, with each op on the device that suits it best."""

    total: float
    """Compute of all ops."""
    path: float
    """Compute of the longest chain.

    A chain goes forward to some op and from there back along the gradients of inputs; a schedule may delay those of
    parameters. An op that needs no gradient sends none back, and an op that is copied to its users (a mask, positions)
    delays none of them."""

    def step_bound(self, stages: int, microbatches: int, chunks: int, slowest: float = 0.0) -> float:
        """Return a step time that no split into so many stages and chunks per stage can beat, with any schedule and links.

        The slowest stage works m times. With one chunk per stage the longest path is a chain of stages: if stage s holds
        t_s of it, its share of the forwards waits for the stages before it, and they wait for its share of the backwards
        (P_s in all), so P_s + m t_s <= step for all s, which adds up to path <= step (1 - (1 - 1/m)^p).
        """
        m, p = microbatches, stages
        if chunks > 1:
            return max(m * self.total / p, self.path)
        return max(m * self.total / p, m * slowest, self.path / (1.0 - (1.0 - 1.0 / m) ** p))


@dataclass(frozen=True, eq=False)
class Pricing:
    """The costs of all splits of one graph on one mesh with one micro-batch size."""

    graph: OpGraph
    costs: tuple[OpCosts, ...]
    """Costs of the ops: one entry for all stages, or one per stage."""
    sizes: Mapping[str, ParameterSize]
    layout: Layout
    optimizer_factor: float = 2.0
    frozen: Collection[str] = ()
    """Parameters without gradient and optimizer state."""
    sums_gradients: bool = True
    """Whether replicas combine gradients in each step."""
    weight_share: float = 1.0
    """The share of the parameters of a stage that a rank holds, apart from those of chunks at work."""

    @cached_property
    def outputs(self) -> OutputTraffic:
        return OutputTraffic(self.graph, self.costs[0], self.layout)

    @cached_property
    def parameters(self) -> ParameterUses:
        return ParameterUses(self.graph, self.sizes, self.frozen)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(
            self.graph,
            self.costs[0],
            self.parameters,
            self.outputs,
            self.layout.memory,
            self.optimizer_factor,
            self.weight_share,
        )

    @cached_property
    def least_work(self) -> LeastWork:
        ops = self.graph.ops
        forward, backward, weight = np.min(self._columns, axis=0).tolist()
        before: dict[int, list[int]] = {}
        for source, target in self.graph.edges:
            if not ops[source].replicable:
                before.setdefault(target, []).append(source)
        there: list[float] = []
        back: list[float] = []
        for op, (f, b) in enumerate(zip(forward, backward)):
            sources = before.get(op, ())
            there.append(f + max((there[source] for source in sources), default=0.0))
            back.append(b + max((back[source] for source in sources if ops[source].requires_grad), default=0.0))
        total = math.fsum(forward) + math.fsum(backward) + math.fsum(weight)
        return LeastWork(total, max((x + y for x, y in zip(there, back)), default=0.0))

    def price(self, chunk_of: Sequence[int] | Ints, placement: Sequence[int]) -> Priced:
        """Return the costs of one split."""
        chunk = np.asarray(chunk_of, dtype=np.int64)
        count = len(placement)
        forward, backward_input, backward_weight = self._seconds(chunk, placement)
        traffic = self.outputs.of_chunks(chunk, placement)
        held = self.parameters.held(chunk, count)
        kept = self.memory.kept(chunk, count, traffic)
        ops = np.bincount(chunk, minlength=count).tolist()
        chunks = tuple(
            ChunkPlan(
                stage=stage,
                ops=ops[c],
                first="",
                last="",
                parameters=0,
                parameter_bytes=int(held.all[c]),
                saved_bytes=int(kept[c]),
                forward=forward[c],
                backward_input=backward_input[c],
                backward_weight=backward_weight[c],
                received_bytes=traffic.received[c],
                reduce=self.layout.reduce_seconds(stage, float(held.trained[c])) if self.sums_gradients else 0.0,
                handling_forward=traffic.handling_forward[c],
                handling_backward=traffic.handling_backward[c],
            )
            for c, stage in enumerate(placement)
        )
        scratch = self.memory.scratch(chunk, placement, traffic)
        return Priced(tuple(placement), chunks, scratch, traffic.pairs, self._ties(chunk, placement))

    def in_two_halves(self, priced: Priced, chunk_of: Sequence[int] | Ints) -> Priced:
        """Return the same split with backwards in two halves, which takes one more action for every backward.

        Every layer that is split takes a little longer. All other ops compute the gradients of their parameters with
        those of their inputs.
        """
        costs = self.costs[0]  # of the first device if they differ: the difference is small
        split = np.array([op.kind == "module" and op.module_class in _SPLIT_LAYERS for op in self.graph.ops])
        longer = np.where(split, np.asarray(costs.split_extra), 0.0) if costs.split_extra else np.zeros(len(split))
        moved = np.where(split, 0.0, np.asarray(costs.backward_weight))

        def by_chunk(values: Floats) -> list[float]:
            found: list[float] = np.bincount(
                np.asarray(chunk_of), weights=values, minlength=len(priced.placement)
            ).tolist()
            return found

        chunks = (
            replace(
                chunk,
                backward_input=chunk.backward_input + more,
                backward_weight=max(0.0, chunk.backward_weight - less) + self.layout.handling.action,
            )
            for chunk, more, less in zip(priced.chunks, by_chunk(longer + moved), by_chunk(moved))
        )
        return replace(priced, chunks=tuple(chunks))

    def _ties(self, chunk: Ints, placement: Sequence[int]) -> tuple[Tie, ...]:
        """Return the trained parameters that several stages use, grouped by chunks."""
        found = []
        for shared in self.parameters.shared(chunk):
            stages = sorted({placement[c] for c in shared.chunks})
            if len(stages) > 1:
                found.append(Tie(shared.chunks, int(shared.size), self.layout.tie_seconds(stages, shared.size)))
        return tuple(found)

    def _seconds(self, chunk: Ints, placement: Sequence[int]) -> list[list[float]]:
        """Return forward, backward for inputs and backward for parameters of each chunk, on the device of its stage."""
        count = len(placement)
        op, where = self._runs(chunk)
        sums = [
            [np.bincount(where, weights=column[op], minlength=count) for column in columns] for columns in self._columns
        ]
        at = [sums[stage if len(sums) > 1 else 0] for stage in placement]
        return [[float(at[c][column][c]) for c in range(count)] for column in range(3)]

    @cached_property
    def _columns(self) -> Floats:
        """Forward, backward for inputs and backward for parameters of every op, for each entry of the costs."""
        return np.array([(c.forward, c.backward_input, c.backward_weight) for c in self.costs], dtype=np.float64)

    def _runs(self, chunk: Ints) -> tuple[Ints, Ints]:
        """Return (op, chunk) for every op in every chunk that runs it: its own, or those of its users if replicable."""
        users: dict[int, set[int]] = {}
        for op, targets in self._replicable_users:
            users[op] = set().union(*(users.get(t, {int(chunk[t])}) for t in targets)) or {int(chunk[op])}
        copies = np.array([(op, home) for op, homes in users.items() for home in homes], dtype=np.int64).reshape(-1, 2)
        once = self._not_replicable
        return np.concatenate((once, copies[:, 0])), np.concatenate((chunk[once], copies[:, 1]))

    @cached_property
    def _not_replicable(self) -> Ints:
        return np.array([i for i, op in enumerate(self.graph.ops) if not op.replicable], dtype=np.int64)

    @cached_property
    def _replicable_users(self) -> list[tuple[int, list[int]]]:
        """Replicable ops from last to first, with the ops that use them."""
        found: dict[int, list[int]] = {i: [] for i, op in enumerate(self.graph.ops) if op.replicable}
        for source, target in self.graph.edges:
            if source in found:
                found[source].append(target)
        return sorted(found.items(), reverse=True)
