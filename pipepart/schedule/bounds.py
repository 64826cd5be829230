"""Lower bounds of the step time: what no schedule of these chunks on these stages can beat."""

from __future__ import annotations

from collections.abc import Sequence

from pipepart.schedule.actions import Edges
from pipepart.schedule.costs import ChunkCosts

__all__ = ["lower_bound"]


def _heads_and_tails(
    placement: Sequence[int], costs: ChunkCosts, edges: Edges, split: bool
) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Per (kind, chunk) of one micro-batch: the longest path before it, its time, and the longest path after it."""
    table = costs.durations()
    chunks = range(len(placement))
    kinds = ("F", "I", "W") if split else ("F", "B")
    back = "I" if split else "B"
    order = [("F", c) for c in chunks] + [(back, c) for c in reversed(chunks)]
    order += [("W", c) for c in chunks] if split else []
    after: dict[tuple[str, int], list[tuple[tuple[str, int], float]]] = {node: [] for node in order}
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
    seconds = {(kind, c): table[kind][c] for kind in kinds for c in chunks}
    head = dict.fromkeys(order, 0.0)
    for node in order:
        for user, link in after[node]:
            head[user] = max(head[user], head[node] + seconds[node] + link)
    tail: dict[tuple[str, int], float] = {}
    for node in reversed(order):
        final = costs.reduce[node[1]] if node[0] in ("B", "W") else 0.0
        tail[node] = max([final] + [link + seconds[user] + tail[user] for user, link in after[node]])
    return {node: (head[node], seconds[node], tail[node]) for node in order}


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    costs: ChunkCosts,
    edges: Edges | None = None,
    *,
    split: bool | None = None,
) -> float:
    """No schedule of ``microbatches`` over chunks placed so can take less, whatever its order and memory.

    For any set of a stage's actions: the shortest way to the first of them, all their work, and the shortest way from
    the last to the end (the one-machine bound with heads and tails). One micro-batch alone gives the longest chain.
    ``split``: whether backwards may be split; None takes the lesser of both.
    """
    edges = costs.edges if edges is None else edges
    if split is None:
        return min(lower_bound(placement, microbatches, costs, edges, split=way) for way in (False, True))
    nodes = _heads_and_tails(placement, costs, edges, split)
    best = max(head + time + tail for head, time, tail in nodes.values())
    for stage in set(placement):
        mine = [nodes[node] for node in nodes if placement[node[1]] == stage]
        for head in {h for h, _, _ in mine}:
            for tail in {q for _, _, q in mine}:
                work = sum(time for h, time, q in mine if h >= head and q >= tail)
                if work:
                    best = max(best, head + microbatches * work + tail)
    return best
