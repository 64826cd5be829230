"""What no plan can beat, by the same costs."""

from __future__ import annotations

import math

import numpy as np

from pipepart.planning.pricing import Pricing
from pipepart.planning.splits import Case

__all__ = ["case_bound", "least_slowest", "step_bound", "work_and_path"]


def work_and_path(pricing: Pricing) -> tuple[float, float]:
    """Of one micro-batch: the compute of all ops, and of the longest chain; each op on the device that suits it best.

    A chain goes forward to some op and from there back along the gradients of inputs (nobody waits for those of
    parameters, which a schedule may put off). What needs no gradient sends none back, and what is copied to where it
    is used (masks, positions) makes nobody wait.
    """
    ops = pricing.graph.ops
    forward = np.min([one.forward for one in pricing.costs], axis=0).tolist()
    backward = np.min([one.backward_input for one in pricing.costs], axis=0).tolist()
    weight = np.min([one.backward_weight for one in pricing.costs], axis=0).tolist()
    before: dict[int, list[int]] = {}
    for source, target in pricing.graph.edges:
        if not ops[source].replicable:
            before.setdefault(target, []).append(source)
    there: list[float] = []
    back: list[float] = []
    for op, (f, b) in enumerate(zip(forward, backward)):
        sources = before.get(op, ())
        there.append(f + max((there[source] for source in sources), default=0.0))
        back.append(b + max((back[source] for source in sources if ops[source].requires_grad), default=0.0))
    work = math.fsum(forward) + math.fsum(backward) + math.fsum(weight)
    return work, max((x + y for x, y in zip(there, back)), default=0.0)


def step_bound(work: float, path: float, stages: int, microbatches: int, slowest: float = 0.0) -> float:
    """A step time that no split into so many stages of one chunk each can beat, whatever the schedule and the links.

    The slowest stage works m times. And the longest path of one micro-batch is a chain: if stage s holds t_s of it, its
    share of the forwards waits for the stages before it, and they wait for its share of the backwards (P_s in all), so
    P_s + m t_s <= step for all s, which adds up to path <= step (1 - (1 - 1/m)^p).
    """
    m, p = microbatches, stages
    return max(m * work / p, m * slowest, path / (1.0 - (1.0 - 1.0 / m) ** p))


def least_slowest(case: Case, chunks: int) -> float:
    """Seconds of compute per micro-batch that the slowest stage has at least."""
    if chunks == 1:
        return case.free_bound
    return work_and_path(case.pricing)[0] / case.shape.stages  # with several chunks a stage can hold any share


def case_bound(case: Case, chunks: int) -> float:
    """`step_bound` for a case: with several chunks per stage neither the chain nor the largest op says more."""
    work, path = work_and_path(case.pricing)
    m, p = case.shape.microbatches, case.shape.stages
    if chunks > 1:
        return max(m * work / p, path)
    return step_bound(work, path, p, m, case.free_bound)
