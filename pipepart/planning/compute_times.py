"""Seconds that chunks compute for one micro-batch: forward, and the two halves of backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph

__all__ = ["SPLIT_LAYERS", "ComputeTimes", "SplitBackward", "Times"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SPLIT_LAYERS = frozenset({"Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d"})
"""The classes of layers whose backward the runtime can run in two halves."""


@dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch on each chunk."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]


@dataclass(frozen=True)
class SplitBackward:
    """Seconds by which the halves of each chunk's backward differ from the parts of a whole one."""

    more_input: tuple[float, ...]
    """Added to the gradients of inputs."""
    less_weight: tuple[float, ...]
    """Taken from the gradients of parameters."""


@dataclass(frozen=True, eq=False)
class ComputeTimes:
    """The times of the ops of one graph, added up by chunk."""

    graph: OpGraph
    costs: tuple[OpCosts, ...]
    """One for all stages, or one per stage."""

    def of_chunks(self, chunk: Ints, placement: Sequence[int]) -> Times:
        """The times of each chunk on the device of its stage."""
        count = len(placement)
        op, where = self._runs(chunk)
        sums = [
            tuple(np.bincount(where, weights=column[op], minlength=count) for column in columns)
            for columns in self._columns
        ]
        at = [sums[stage if len(sums) > 1 else 0] for stage in placement]
        return Times(*(tuple(float(at[c][column][c]) for c in range(count)) for column in range(3)))

    def split_backward(self, chunk_of: Sequence[int] | Ints, count: int) -> SplitBackward:
        """The difference that a backward in two halves makes.

        Every layer that is run that way takes a little longer; of all other ops the gradients of parameters come with
        those of the inputs.
        """
        costs = self.costs[0]  # of the first device where they differ: what is moved is small
        split = np.array([op.kind == "module" and op.module_class in SPLIT_LAYERS for op in self.graph.ops])
        longer = np.where(split, np.asarray(costs.split_extra), 0.0) if costs.split_extra else np.zeros(len(split))
        moved = np.where(split, 0.0, np.asarray(costs.backward_weight))

        def by_chunk(values: Floats) -> tuple[float, ...]:
            return tuple(np.bincount(np.asarray(chunk_of), weights=values, minlength=count).tolist())

        return SplitBackward(by_chunk(longer + moved), by_chunk(moved))

    @cached_property
    def _columns(self) -> tuple[tuple[Floats, Floats, Floats], ...]:
        return tuple(
            (np.asarray(c.forward), np.asarray(c.backward_input), np.asarray(c.backward_weight)) for c in self.costs
        )

    def _runs(self, chunk: Ints) -> tuple[Ints, Ints]:
        """(op, chunk) for every op in every chunk that runs it: its own, or for replicable ops those that use it."""
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
