"""The tensors that chunks exchange for one micro-batch: bytes, seconds on the links, and seconds of handling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph
from pipepart.partition import Link
from pipepart.planning.layout import Layout
from pipepart.planning.plan_parts import Traffic

__all__ = ["ChunkTraffic", "HandlingTimes", "OutputTraffic"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChunkTraffic:
    """The traffic of one split."""

    pairs: tuple[Traffic, ...]
    """By source and target."""
    sent: tuple[tuple[int, int], ...]
    """(op, chunk) for every output that goes to another chunk."""

    def received(self, chunks: int) -> list[float]:
        """Bytes that arrive at each chunk from earlier ones."""
        found = [0.0] * chunks
        for pair in self.pairs:
            found[pair.target] += pair.forward_bytes
        return found


@dataclass(frozen=True)
class HandlingTimes:
    """Seconds that each forward and each backward of a chunk takes on its device besides computing."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class OutputTraffic:
    """The outputs of the ops of one graph, and the links of one mesh that they travel over."""

    graph: OpGraph
    costs: OpCosts
    layout: Layout

    @cached_property
    def sent(self) -> Floats:
        """Bytes of each op's output; replicable ops (masks, positions) are copied where they are used, never sent."""
        sizes = zip(self.graph.ops, self.costs.output_bytes)
        return np.array([0.0 if op.replicable else float(size) for op, size in sizes])

    @cached_property
    def sent_back(self) -> Floats:
        """Bytes of the gradient of each op's output; at least one, since a gradient of no bytes is waited for, too."""
        back = [op.requires_grad and not op.replicable for op in self.graph.ops]
        return np.where(back, np.maximum(self.sent, 1.0), 0.0)

    def of_chunks(self, chunk: Ints, placement: Sequence[int]) -> ChunkTraffic:
        """The exchange between each pair of chunks."""
        count = len(placement)
        source, target = self._edges
        crosses = chunk[source] != chunk[target]
        # A tensor is sent once to each chunk that uses it.
        keys = np.unique(source[crosses] * count + chunk[target[crosses]])
        sender = keys // count
        pairs, which = np.unique(chunk[sender] * count + keys % count, return_inverse=True)
        ahead = np.bincount(which, weights=self.sent[sender], minlength=len(pairs))
        back = np.bincount(which, weights=self.sent_back[sender], minlength=len(pairs))
        found = []
        for pair, there, again in zip(pairs.tolist(), ahead.tolist(), back.tolist()):
            a, b = divmod(pair, count)
            seconds = (0.0, 0.0)
            if placement[a] != placement[b]:
                link = self._link(placement[a], placement[b])
                seconds = (link.seconds(there), link.seconds(again))
            found.append(Traffic(a, b, int(there), int(again), *seconds))
        return ChunkTraffic(tuple(found), tuple(zip(sender.tolist(), (keys % count).tolist())))

    def handling(self, placement: Sequence[int], traffic: ChunkTraffic) -> HandlingTimes:
        """The handling of the messages of each chunk, and of starting its actions."""
        messages = [[0, 0] for _ in placement]
        sizes = [[0.0, 0.0] for _ in placement]
        for pair in traffic.pairs:
            if placement[pair.source] != placement[pair.target]:
                for end in (pair.source, pair.target):
                    messages[end][0] += 1
                    messages[end][1] += pair.backward_bytes > 0
                    sizes[end][0] += pair.forward_bytes
                    sizes[end][1] += pair.backward_bytes
        found = [tuple(map(self.layout.handling.seconds, *both)) for both in zip(messages, sizes)]
        return HandlingTimes(tuple(f for f, _ in found), tuple(b for _, b in found))

    @cached_property
    def _edges(self) -> tuple[Ints, Ints]:
        pairs = [(a, b) for a, b in self.graph.edges if not self.graph.ops[a].replicable]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {}

    def _link(self, a: int, b: int) -> Link:
        pair = (min(a, b), max(a, b))
        if pair not in self._links:
            self._links[pair] = self.layout.link(*pair)
        return self._links[pair]
