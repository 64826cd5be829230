"""Zero-bubble schedules that are searched: the order of actions fits the times of the chunks and a memory limit.

Every stage takes, whenever it is free, the best action that is ready: ``I`` before ``F`` before ``W``. A few ways to
limit its forwards and to place ``W`` are tried, and the shortest step is kept (after Qi et al. 2023, section 3.1).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Action, Schedule
from pipepart.schedule.chunk_costs import ChunkCosts
from pipepart.schedule.registry import named

__all__ = ["Searched", "search_order", "zb_1p", "zb_2p"]

_PATIENCE = (0.25, 1.0)
"""Shares of the time of a ``W`` that must fit in before the next arrival that is known. Below 1, neighbours may wait."""
_MORE = (0, 1)
"""Forwards that a stage may have in flight beyond those that a balanced pipeline needs."""


@dataclass(frozen=True)
class _Policy:
    """How a stage chooses among the actions that are ready, and the memory that it has."""

    limit: float
    """Activations of its own micro-batches that a stage may keep."""
    depth: int
    """Forwards in flight that each following stage allows."""
    more: int
    patience: float
    in_turn: bool
    """Whether ``F`` comes before ``I`` if the stage has just done an ``I``."""


@dataclass(frozen=True)
class Searched:
    """An order of actions with its times."""

    step: float
    """Seconds from the first start to the last end."""
    period: float
    """Longest time from a stage's own first start to its own last end."""
    orders: tuple[tuple[Action, ...], ...]


class _Stage:
    """The state of one stage while its list grows."""

    def __init__(self, stage: int, stages: int, microbatches: int, policy: _Policy) -> None:
        self.policy, self.ahead = policy, policy.depth * (stages - 1 - stage) + 1 + policy.more
        self.last = ""
        self.done = {"F": 0, "I": 0, "W": 0}
        self.arrived: dict[str, list[float]] = {
            "F": [math.inf if stage else 0.0] * microbatches,
            "I": [math.inf] * microbatches,
        }
        self.live = self.free = self.first = 0.0
        self.order: list[Action] = []

    def when(self, kind: str) -> float:
        """Return the arrival of the next ``F`` or ``I``, as far as it is known."""
        arrived, k = self.arrived[kind], self.done[kind]
        return arrived[k] if k < len(arrived) else math.inf

    def choose(self, now: float, weight: float) -> str:
        """Return the kind of the next action; empty: the stage waits. ``weight`` are the seconds of its ``W``."""
        forward, backward = self.when("F"), self.when("I")
        done, policy = self.done, self.policy
        blocked = self.live + 1.0 > policy.limit * (1 + 1e-9) or done["F"] - done["I"] >= self.ahead
        ready = forward <= now and not blocked
        if backward <= now and not (ready and policy.in_turn and self.last == "I"):
            return "I"
        if ready:
            return "F"
        due = backward if blocked else min(backward, forward)
        if done["W"] < done["I"] and (forward <= now or now + policy.patience * weight <= due):
            return "W"
        return ""


def _run(stages: int, microbatches: int, costs: ChunkCosts, policy: _Policy) -> Searched:
    """Let all stages choose."""
    lines = [_Stage(s, stages, microbatches, policy) for s in range(stages)]
    seconds = {
        "F": [a + b for a, b in zip(costs.handling_forward, costs.forward)],
        "I": [a + b for a, b in zip(costs.handling_backward, costs.backward_input)],
        "W": list(costs.backward_weight),
    }
    kept = costs.kept_for_weight
    wakes = [(0.0, s) for s in range(stages)]

    def arrive(stage: int, kind: str, k: int, when: float) -> None:
        lines[stage].arrived[kind][k] = when
        heapq.heappush(wakes, (when, stage))

    while wakes:
        now, s = heapq.heappop(wakes)
        line = lines[s]
        kind = "" if line.free > now else line.choose(now, seconds["W"][s])
        if not kind:
            continue
        k, end = line.done[kind], now + seconds[kind][s]
        line.first = line.first if line.order else now + costs.handling_forward[s]
        line.order.append(Action(kind, s, k))
        line.done[kind], line.free = k + 1, end
        line.last = line.last if kind == "W" else kind
        heapq.heappush(wakes, (end, s))
        if kind == "F":
            line.live += 1.0
            if s + 1 < stages:
                arrive(s + 1, "F", k, end + costs.send_forward.get((s, s + 1), 0.0))
            else:
                arrive(s, "I", k, end)
        elif kind == "I":
            line.live -= 1.0 - kept
            if s:
                arrive(s - 1, "I", k, end + costs.send_backward.get((s - 1, s), 0.0))
        else:
            line.live -= kept
    assert all(line.done["W"] == microbatches for line in lines), "a stage with room for one micro-batch never stops"
    period = max(line.free - line.first for line in lines)
    return Searched(max(line.free for line in lines), period, tuple(tuple(line.order) for line in lines))


def search_order(stages: int, microbatches: int, costs: ChunkCosts, depth: int, *, overlap: bool = False) -> Searched:
    """Return the best order that keeps at most ``depth * stages`` activations on each stage.

    Recomputation is left out, since it is chosen for an order. The best has the shortest step, or with ``overlap`` the
    shortest period: the time per step if a stage need not wait for the others between steps.
    """
    if costs.chunks != stages:
        raise ScheduleError(f"zero-bubble search: expected costs of {stages} chunks, one per stage, got {costs.chunks}")
    found = [
        _run(stages, microbatches, costs, _Policy(float(depth * stages), depth, more, patience, in_turn))
        for in_turn in (True, False)
        for more in _MORE
        for patience in _PATIENCE
    ]
    return min(found, key=lambda one: (one.period, one.step) if overlap else (one.step, one.period))


def _searched(name: str, stages: int, microbatches: int, costs: ChunkCosts, depth: int) -> Schedule:
    orders = search_order(stages, microbatches, costs, depth).orders
    return Schedule(name, stages, microbatches, tuple(range(stages)), orders)


_OPTIONS: dict[str, Any] = {"fixed_chunks": 1, "splits_backward": True, "takes_costs": True}


@named("zb_1p", "backward split, order searched by the times of the stages: at most p activations", **_OPTIONS)
def zb_1p(stages: int, microbatches: int, costs: ChunkCosts) -> Schedule:
    """Zero bubble by search, with the memory of 1F1B's first stage (ZB-1p of Qi et al. 2023).

    ::

        stage  0  012..Aa3Bb4Cc5DdEeFf
        stage  1  .01.A2Ba3Cb4Dc5EdFef
        stage  2  ..0A1B2Ca3Db4Ec5Fdef
    """
    return _searched("zb_1p", stages, microbatches, costs, 1)


@named("zb_2p", "backward split, order searched by the times of the stages: at most 2p activations", **_OPTIONS)
def zb_2p(stages: int, microbatches: int, costs: ChunkCosts) -> Schedule:
    """Zero bubble by search, with twice the memory (ZB-2p of Qi et al. 2023).

    Its bubble in consecutive steps without a barrier is nearly zero (see `Searched.period`).

    ::

        stage  0  01234A5BaCbDcEdFef..
        stage  1  .012A3B4C5DaEbFcdef.
        stage  2  ..0A1B2C3D4E5Fabcdef
    """
    return _searched("zb_2p", stages, microbatches, costs, 2)
