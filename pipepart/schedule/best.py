"""The best schedule for given costs: every fixed one that fits, list schedules made for the costs, small changes.

The simulator judges. What comes out is never slower in simulation than the best fixed schedule within the memory limit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Edges, Schedule, looped_placement, v_placement
from pipepart.schedule.chunk_times import ChunkCosts
from pipepart.schedule.fixed import gpipe, interleaved, one_f_one_b
from pipepart.schedule.greedy import Policy, list_schedule
from pipepart.schedule.reorder import improve
from pipepart.schedule.simulate import step_time
from pipepart.schedule.step_bounds import lower_bound
from pipepart.schedule.validate import peak_activations
from pipepart.schedule.zero_bubble import zb_h1, zb_h2, zb_v

__all__ = ["Choice", "best_schedule"]

_TIE = 1 + 1e-9
_VARIED = 150
"""How many list schedules are tried with varied costs, at most."""


@dataclass(frozen=True)
class Choice:
    """The best schedule found, how long its step takes, and what it was compared with."""

    schedule: Schedule
    step_time: float
    bound: float
    """No schedule over the placements considered, within the memory limit, can be shorter."""
    fixed: tuple[tuple[str, float], ...] = field(repr=False)
    """The fixed schedules that fit in memory, with their step times."""

    @property
    def gap(self) -> float:
        """How much shorter a step could be at most, as a part of the bound."""
        return self.step_time / self.bound - 1 if self.bound else 0.0


def _fixed(stages: int, microbatches: int, chunks: int, split: bool) -> Iterator[tuple[str, Schedule]]:
    """All fixed schedules for so many chunks per stage, 1F1B also with slack."""
    if chunks == 1:
        slacks = [slack for slack in sorted({0, 1, stages // 2, stages - 1}) if slack == 0 or slack < microbatches]
        yield from ((f"1f1b slack={n}" if n else "1f1b", one_f_one_b(stages, microbatches, n)) for n in slacks)
        if split:
            yield "zb_h1", zb_h1(stages, microbatches)
            yield "zb_h2", zb_h2(stages, microbatches)
    else:
        yield "interleaved", interleaved(stages, microbatches, chunks)
        if chunks == 2 and split:
            yield "zb_v", zb_v(stages, microbatches)
    yield "gpipe", gpipe(stages, microbatches, chunks)


def _policies(chunks: int, split: bool) -> list[Policy]:
    """Policies to try, the most promising first."""
    deep = (True, False) if chunks > 1 else (True,)
    ways = [
        Policy(split=True, forward_first=first, deep_first=d, patience=patience)
        for patience, first, d in product((0.0, 1.0, 0.5), (False, True), deep)
    ]
    whole = [Policy(split=False, forward_first=first, deep_first=d) for first, d in product((False, True), deep)]
    return ways[:3] + whole[:1] + ways[3:] + whole[1:] if split else whole


def _limits(
    stages: int, microbatches: int, placement: Sequence[int], costs: ChunkCosts, memory_limit: Sequence[float] | None
) -> list[tuple[float, ...]]:
    """Limits to try: the memory itself, and less, since less in flight can also be the shorter way."""
    one = [sum(costs.activation[c] for c, home in enumerate(placement) if home == s) for s in range(stages)]
    most = [microbatches * size for size in one] if memory_limit is None else list(memory_limit)
    found = []
    for count in (microbatches, stages, 2 * stages - 1, stages + 1):
        limits = tuple(min(top, max(count, 1) * size) for top, size in zip(most, one))
        if limits not in found:
            found.append(limits)
    ramp = tuple(min(top, (stages - s) * size) for s, (top, size) in enumerate(zip(most, one)))
    return found if ramp in found else [*found, ramp]


def _varied(costs: ChunkCosts, draw: random.Random) -> ChunkCosts:
    """The same costs a little off, so that list scheduling decides differently where it was a close call."""
    spread = draw.choice((0.1, 0.3, 0.6))

    def off(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * draw.uniform(1 - spread, 1 + spread) for value in values)

    return replace(
        costs,
        forward=off(costs.forward),
        backward=off(costs.backward),
        backward_input=off(costs.backward_input),
        backward_weight=off(costs.backward_weight),
    )


def best_schedule(
    stages: int,
    microbatches: int,
    costs: ChunkCosts,
    *,
    edges: Edges | None = None,
    placement: Sequence[int] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    split: bool = True,
    effort: int = 200_000,
) -> Choice:
    """The shortest schedule found for these chunks.

    ``placement`` fixes where the chunks are; without it looped and (with several chunks per stage) V-shaped placement
    are tried. ``memory_limit`` is what the live activations of a stage may weigh, in the unit of
    ``costs.activation``, for all stages or for each. ``split=False`` leaves out schedules with ``I`` and ``W``.
    ``effort`` bounds the search: about how many actions are scheduled and simulated in all, the fixed ones aside.
    The same arguments always give the same schedule.
    """
    if placement is None and costs.chunks % stages:
        raise ScheduleError(
            f"auto: {costs.chunks} chunks cannot be spread evenly over {stages} stages; give a placement"
        )
    edges = costs.edges if edges is None else edges
    limit = [float(memory_limit)] * stages if isinstance(memory_limit, (int, float)) else memory_limit
    if limit is not None and len(limit) != stages:
        raise ScheduleError(f"auto: memory_limit has {len(limit)} entries, expected one per stage ({stages})")
    chunks = costs.chunks // stages
    if placement is None:
        placements = [looped_placement(stages, chunks)]
        if chunks > 1 and stages > 1:
            placements.append(v_placement(stages, chunks))
    else:
        placements = [tuple(placement)]
    bound = min(
        lower_bound(where, microbatches, costs, edges, split=way, memory_limit=limit)
        for where in placements
        for way in ((False, True) if split else (False,))
    )

    def fits(schedule: Schedule) -> bool:
        peaks = peak_activations(schedule, costs.activation, costs.kept_for_weight)
        return limit is None or all(peak <= most * _TIE for peak, most in zip(peaks, limit))

    best: tuple[float, Schedule] | None = None
    judged: list[tuple[str, float]] = []
    if costs.chunks % stages == 0:
        for name, schedule in _fixed(stages, microbatches, chunks, split):
            if schedule.placement in placements and fits(schedule):
                time = step_time(schedule, costs, edges)
                judged.append((name, time))
                if best is None or time < best[0]:
                    best = time, schedule
    rounds = max(1, effort // (2 * 3 * costs.chunks * microbatches))
    ways = [
        (where, policy, limits)
        for policy in _policies(chunks, split)
        for where in placements
        for limits in _limits(stages, microbatches, where, costs, limit)
    ]
    draw = random.Random(0)
    for n in range(min(rounds, len(ways) + _VARIED)):
        if best is not None and best[0] <= bound * _TIE:
            break
        where, policy, limits = ways[n] if n < len(ways) else draw.choice(ways)
        judged_by = costs if n < len(ways) else _varied(costs, draw)
        schedule = list_schedule(where, microbatches, judged_by, edges=edges, limits=limits, policy=policy)
        time = step_time(schedule, costs, edges)
        if (best is None or time < best[0] / _TIE) and fits(schedule):
            best = time, schedule
    assert best is not None
    if best[0] > bound * _TIE:
        time, schedule = improve(best[1], costs, edges, fits=fits, rounds=min(rounds, 300), bound=bound)
        if time < best[0] / _TIE:
            best = time, replace(schedule, name="auto")
    return Choice(best[1], best[0], bound, tuple(judged))
