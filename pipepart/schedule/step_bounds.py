"""Lower bounds of the step time: what no schedule of these chunks on these stages can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipepart.schedule.actions import Edges
from pipepart.schedule.chunk_times import ChunkCosts

__all__ = ["lower_bound"]


Node = tuple[str, int]


@dataclass(frozen=True)
class _Paths:
    """One micro-batch alone: the actions in an order that keeps all needs, their times, and who uses their results."""

    order: tuple[Node, ...]
    seconds: dict[Node, float]
    after: dict[Node, list[tuple[Node, float]]]
    """Users of a result, with the time of the link to them."""

    @staticmethod
    def of(placement: Sequence[int], costs: ChunkCosts, edges: Edges, split: bool) -> _Paths:
        table = costs.durations()
        chunks = range(len(placement))
        back = "I" if split else "B"
        order = [("F", c) for c in chunks] + [(back, c) for c in reversed(chunks)]
        order += [("W", c) for c in chunks] if split else []
        after: dict[Node, list[tuple[Node, float]]] = {node: [] for node in order}
        for c in chunks:
            after["F", c].append(((back, c), 0.0))
            if split:
                after["I", c].append((("W", c), 0.0))
        for source, target in edges.forward:
            link = costs.send_forward.get((source, target), 0.0) if placement[source] != placement[target] else 0.0
            after["F", source].append((("F", target), link))
        for source, target in edges.backward:
            link = costs.send_backward.get((source, target), 0.0) if placement[source] != placement[target] else 0.0
            after[back, target].append(((back, source), link))
        return _Paths(tuple(order), {node: table[node[0]][node[1]] for node in order}, after)

    def heads(self) -> dict[Node, float]:
        """The longest path from the start to the start of each action."""
        head = dict.fromkeys(self.order, 0.0)
        for node in self.order:
            for user, link in self.after[node]:
                head[user] = max(head[user], head[node] + self.seconds[node] + link)
        return head

    def tails(self, costs: ChunkCosts) -> dict[Node, float]:
        """The longest path from the end of each action to the end of all, reductions included."""
        tail: dict[Node, float] = {}
        for node in reversed(self.order):
            final = costs.reduce[node[1]] if node[0] in ("B", "W") else 0.0
            tail[node] = max([final] + [link + self.seconds[user] + tail[user] for user, link in self.after[node]])
        return tail


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    costs: ChunkCosts,
    edges: Edges | None = None,
    *,
    split: bool | None = None,
) -> float:
    """No schedule of ``microbatches`` over chunks placed so can take less, whatever its order.

    For any set of a stage's actions: the shortest way to the first of them, all their work, and the shortest way from
    the last to the end (the one-machine bound with heads and tails). One micro-batch alone gives the longest chain.
    ``split``: whether backwards are split; None takes the lesser of both.
    """
    edges = costs.edges if edges is None else edges
    if split is None:
        return min(lower_bound(placement, microbatches, costs, edges, split=way) for way in (False, True))
    paths = _Paths.of(placement, costs, edges, split)
    heads, tails = paths.heads(), paths.tails(costs)
    best = max(heads[node] + paths.seconds[node] + tails[node] for node in paths.order)
    for stage in set(placement):
        mine = [(heads[n], paths.seconds[n], tails[n]) for n in paths.order if placement[n[1]] == stage]
        for head in {h for h, _, _ in mine}:
            for tail in {q for _, _, q in mine}:
                work = sum(time for h, time, q in mine if h >= head and q >= tail)
                if work:
                    best = max(best, head + microbatches * work + tail)
    return best
