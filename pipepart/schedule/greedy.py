"""List scheduling: at each moment every free stage takes the best ready action, under a memory limit."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Action, Edges, Schedule
from pipepart.schedule.chunk_costs import ChunkCosts

__all__ = ["Policy", "list_schedule"]

_NEVER = float("inf")


@dataclass(frozen=True)
class Policy:
    """The rules by which a stage chooses among ready actions."""

    split: bool = True
    """Backward as ``I`` and ``W`` instead of ``B``."""
    forward_first: bool = False
    """Forwards before backwards while memory lasts (more in flight early), instead of backwards first."""
    deep_first: bool = True
    """Among forwards: the latest chunk first (drains), instead of the earliest (fills)."""
    patience: float = 1.0
    """``W`` starts only if it fits before the next known arrival, to this part of its length (0: always starts)."""


class _Stage:
    """The state of one stage. Micro-batches pass each chunk in order."""

    def __init__(self, chunks: Sequence[int], limit: float) -> None:
        self.chunks = tuple(chunks)
        self.limit = limit
        self.live = 0.0
        self.free = 0.0
        self.order: list[Action] = []


class _ListScheduler:
    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        costs: ChunkCosts,
        edges: Edges,
        limits: Sequence[float],
        policy: Policy,
    ) -> None:
        self.placement, self.microbatches, self.costs, self.policy = tuple(placement), microbatches, costs, policy
        chunks = len(placement)
        self.stages = [
            _Stage([c for c in range(chunks) if placement[c] == s], limits[s]) for s in range(max(placement) + 1)
        ]
        self.seconds = costs.durations()
        self.back = "I" if policy.split else "B"
        needed_f, needed_b = [0] * chunks, [1] * chunks  # a backward also needs its own forward
        self.ahead: list[list[tuple[int, float]]] = [[] for _ in range(chunks)]
        self.behind: list[list[tuple[int, float]]] = [[] for _ in range(chunks)]
        for source, target in sorted(edges.forward):
            self.ahead[source].append((target, costs.link("F", source, target, placement)))
            needed_f[target] += 1
        for source, target in sorted(edges.backward):
            self.behind[target].append((source, costs.link("B", source, target, placement)))
            needed_b[source] += 1
        # The number of inputs that are still missing, and the arrival of the last one that came.
        self.missing_f = [[count] * microbatches for count in needed_f]
        self.missing_b = [[count] * microbatches for count in needed_b]
        self.ready_f = [[0.0] * microbatches for _ in range(chunks)]
        self.ready_b = [[0.0] * microbatches for _ in range(chunks)]
        self.next = {kind: [0] * chunks for kind in ("F", "B", "W")}
        self.wakes: list[tuple[float, int]] = [(0.0, s) for s in range(len(self.stages))]

    def run(self) -> list[list[Action]] | None:
        """Actions of each stage in order; None if the stages wait for each other's memory."""
        left = len(self.placement) * self.microbatches * (3 if self.policy.split else 2)
        while self.wakes:
            now, s = heapq.heappop(self.wakes)
            while self.wakes and self.wakes[0] == (now, s):
                heapq.heappop(self.wakes)
            stage = self.stages[s]
            if stage.free > now:
                continue
            choice = self.choose(stage, now)
            if choice is not None:
                self.commit(s, choice, now)
                left -= 1
        return None if left else [stage.order for stage in self.stages]

    def when(self, kind: str, chunk: int) -> float:
        """Time at which all inputs of the next action of this kind and chunk are there; infinite if one is not on its way."""
        k = self.next[kind][chunk]
        if k >= self.microbatches:
            return _NEVER
        if kind == "F":
            return _NEVER if self.missing_f[chunk][k] else self.ready_f[chunk][k]
        return _NEVER if self.missing_b[chunk][k] else self.ready_b[chunk][k]

    def fits(self, stage: _Stage, chunk: int) -> bool:
        """Whether there is room for a forward and for its micro-batch in the stage's later chunks, so that none is stuck."""
        later = sum(self.costs.activation[c] for c in stage.chunks if c >= chunk)
        return stage.live + later <= stage.limit * (1 + 1e-9)

    def choose(self, stage: _Stage, now: float) -> tuple[str, int] | None:
        policy = self.policy
        arrival = _NEVER
        backward: tuple[str, int] | None = None
        forward: tuple[str, int] | None = None
        blocked = False
        oldest = self.microbatches
        for chunk in reversed(stage.chunks):
            when = self.when("B", chunk)
            if when <= now:
                if self.next["B"][chunk] < oldest:
                    oldest, backward = self.next["B"][chunk], (self.back, chunk)
            else:
                arrival = min(arrival, when)
        for chunk in reversed(stage.chunks) if policy.deep_first else stage.chunks:
            when = self.when("F", chunk)
            if when == _NEVER:
                continue
            if not self.fits(stage, chunk):
                blocked = blocked or when <= now
            elif when <= now:
                forward = forward or ("F", chunk)
            else:
                arrival = min(arrival, when)
        first, second = (forward, backward) if policy.forward_first else (backward, forward)
        if first or second:
            return first or second
        pending = [c for c in stage.chunks if self.next["W"][c] < self.next["B"][c]] if policy.split else []
        if not pending:
            return None
        chunk = min(pending, key=lambda c: (self.next["W"][c], -c))
        if blocked or now + self.seconds["W"][chunk] * policy.patience <= arrival:
            return "W", chunk
        return None

    def commit(self, s: int, choice: tuple[str, int], now: float) -> None:
        kind, chunk = choice
        stage, costs = self.stages[s], self.costs
        counter = self.next["B" if kind == "I" else kind]
        k = counter[chunk]
        counter[chunk] = k + 1
        end = stage.free = now + self.seconds[kind][chunk]
        stage.order.append(Action(kind, chunk, k))
        size = costs.activation[chunk]
        if kind == "F":
            stage.live += size
            self.arrive(self.missing_b, self.ready_b, chunk, k, end)
            for target, link in self.ahead[chunk]:
                self.arrive(self.missing_f, self.ready_f, target, k, end + link)
        elif kind == "W":
            stage.live -= size * costs.kept_for_weight
        else:
            stage.live -= size * (1 - costs.kept_for_weight) if kind == "I" else size
            for source, link in self.behind[chunk]:
                self.arrive(self.missing_b, self.ready_b, source, k, end + link)
        heapq.heappush(self.wakes, (end, s))

    def arrive(self, missing: list[list[int]], ready: list[list[float]], chunk: int, k: int, when: float) -> None:
        missing[chunk][k] -= 1
        ready[chunk][k] = max(ready[chunk][k], when)
        if not missing[chunk][k]:
            heapq.heappush(self.wakes, (ready[chunk][k], self.placement[chunk]))


def list_schedule(
    placement: Sequence[int],
    microbatches: int,
    costs: ChunkCosts,
    *,
    edges: Edges | None = None,
    limits: Sequence[float] | None = None,
    policy: Policy | None = None,
    name: str = "list",
) -> Schedule:
    """The schedule that a policy makes for these costs. ``limits`` are the largest live activations of each stage."""
    edges = costs.edges if edges is None else edges
    stages = max(placement) + 1
    limits = [_NEVER] * stages if limits is None else limits
    for stage in range(stages):
        least = sum(costs.activation[c] for c, home in enumerate(placement) if home == stage)
        if least > limits[stage] * (1 + 1e-9):
            raise ScheduleError(
                f"stage {stage}: one micro-batch keeps {least:g} of activations, the limit is {limits[stage]:g}; "
                "smaller micro-batches, recompute or more stages make it fit"
            )
    orders = _ListScheduler(placement, microbatches, costs, edges, limits, policy or Policy()).run()
    if orders is None:
        # Chunks without edges between them can fill the memory with micro-batches that wait for one another. Chunks in
        # sequence cannot.
        chain = Edges.chain(len(placement))
        edges = Edges(edges.forward | chain.forward, edges.backward | chain.backward)
        orders = _ListScheduler(placement, microbatches, costs, edges, limits, policy or Policy()).run()
    assert orders is not None
    return Schedule(name, stages, microbatches, tuple(placement), tuple(map(tuple, orders)))
