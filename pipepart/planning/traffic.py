"""The tensors that chunks exchange for one micro-batch: bytes, seconds on the links, and host overhead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph
from pipepart.partition import Link
from pipepart.planning.chunks import Traffic
from pipepart.planning.layout import Layout

__all__ = ["ChunkTraffic", "OutputTraffic"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class SentOutput(NamedTuple):
    """The output of an op that goes to another chunk."""

    op: int
    target: int


@dataclass(frozen=True)
class ChunkTraffic:
    """The traffic of one split."""

    pairs: tuple[Traffic, ...]
    """By source and target."""
    sent: tuple[SentOutput, ...]
    received: tuple[int, ...]
    """Per chunk: bytes from earlier chunks."""
    handling_forward: tuple[float, ...]
    """Per chunk: host overhead of each forward, in seconds."""
    handling_backward: tuple[float, ...]
    """Per chunk: host overhead of each backward, in seconds."""


@dataclass(frozen=True, eq=False)
class OutputTraffic:
    """The outputs of the ops of one graph, and the links of one mesh."""

    graph: OpGraph
    costs: OpCosts
    layout: Layout

    @cached_property
    def sent(self) -> Floats:
        """Bytes of each op's output. Replicable ops (masks, positions) run again where they are used and are never sent."""
        sizes = zip(self.graph.ops, self.costs.output_bytes)
        return np.array([0.0 if op.replicable else float(size) for op, size in sizes])

    @cached_property
    def sent_back(self) -> Floats:
        """Bytes of the gradient of each op's output; at least one, since a chunk also waits for a gradient of no bytes."""
        back = [op.requires_grad and not op.replicable for op in self.graph.ops]
        return np.where(back, np.maximum(self.sent, 1.0), 0.0)

    def of_chunks(self, chunk: Ints, placement: Sequence[int]) -> ChunkTraffic:
        """Return the traffic between each pair of chunks."""
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
        sent = tuple(map(SentOutput, sender.tolist(), (keys % count).tolist()))
        return self._with_handling(placement, tuple(found), sent)

    def _with_handling(
        self, placement: Sequence[int], pairs: tuple[Traffic, ...], sent: tuple[SentOutput, ...]
    ) -> ChunkTraffic:
        """Add up the bytes and the messages of each chunk."""
        received = [0] * len(placement)
        messages = [[0, 0] for _ in placement]
        sizes = [[0.0, 0.0] for _ in placement]
        for pair in pairs:
            received[pair.target] += pair.forward_bytes
            if placement[pair.source] != placement[pair.target]:
                for end in (pair.source, pair.target):
                    messages[end][0] += 1
                    messages[end][1] += pair.backward_bytes > 0
                    sizes[end][0] += pair.forward_bytes
                    sizes[end][1] += pair.backward_bytes
        found = [tuple(map(self.layout.handling.seconds, *both)) for both in zip(messages, sizes)]
        return ChunkTraffic(pairs, sent, tuple(received), tuple(f for f, _ in found), tuple(b for _, b in found))

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
