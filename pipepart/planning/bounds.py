"""What no plan can beat, by the same costs."""

from __future__ import annotations

import numpy as np

from pipepart.planning.pricing import Pricing
from pipepart.planning.splits import Case

__all__ = ["case_bound", "least_slowest", "step_bound", "work_and_path"]


def work_and_path(pricing: Pricing) -> tuple[float, float]:
    """Of one micro-batch: the compute of all ops, and of the longest chain of ops; each op on the device that suits it."""
    seconds = np.min([np.asarray(c.forward) + np.asarray(c.backward) for c in pricing.costs], axis=0).tolist()
    before: dict[int, list[int]] = {}
    for source, target in pricing.graph.edges:
        before.setdefault(target, []).append(source)
    longest: list[float] = []
    for op, time in enumerate(seconds):
        longest.append(time + max((longest[source] for source in before.get(op, ())), default=0.0))
    return float(sum(seconds)), max(longest, default=0.0)


def step_bound(work: float, path: float, stages: int, microbatches: int, slowest: float = 0.0) -> float:
    """A step time that no split into so many stages of one chunk each can beat, whatever the schedule and the links.

    The slowest stage works m times. And the ops on the longest path of one micro-batch form a chain: if stage s holds
    t_s of it, it cannot start before the stages before it (P_s) and they cannot end before it, so P_s + m t_s <= step
    for all s, which adds up to path <= step (1 - (1 - 1/m)^p).
    """
    m, p = microbatches, stages
    return max(m * work / p, m * slowest, path / (1.0 - (1.0 - 1.0 / m) ** p))


def least_slowest(case: Case, chunks: int) -> float:
    """Seconds of compute per micro-batch that the slowest stage has at least."""
    if chunks == 1:
        return case.free_bound
    return work_and_path(case.pricing)[0] / case.request.stages  # with several chunks a stage can hold any share


def case_bound(case: Case, chunks: int) -> float:
    """`step_bound` for a case: with several chunks per stage neither the chain nor the largest op says more."""
    work, path = work_and_path(case.pricing)
    m, p = case.request.microbatches, case.request.stages
    if chunks > 1:
        return max(m * work / p, path)
    return step_bound(work, path, p, m, case.free_bound)
