"""Small changes to a schedule: move actions off the critical path, keep what the simulator finds shorter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pipepart.schedule.actions import Action, Edges, Schedule
from pipepart.schedule.chunk_times import ChunkCosts
from pipepart.schedule.dependencies import ActionGraph
from pipepart.schedule.simulate import run_graph, step_time

__all__ = ["improve"]


def _critical_blocks(graph: ActionGraph, start: list[float], end: list[float]) -> list[tuple[int, int]]:
    """The runs of actions (first, last) that follow each other without a pause on one stage of the critical path."""
    starts = set(graph.first)
    n = max(range(len(end)), key=lambda i: end[i])
    blocks = []
    while True:
        last = n
        while n not in starts and end[n - 1] >= start[n] - 1e-12 and n - 1 not in graph.needs[n]:
            n -= 1
        blocks.append((n, last))
        feeding = [need for need in graph.needs[n] if graph.stage[need] != graph.stage[n] or need == n - 1]
        if not feeding:
            return blocks
        n = max(feeding, key=lambda need: end[need])


def _moves(schedule: Schedule, graph: ActionGraph, blocks: list[tuple[int, int]]) -> Iterator[Schedule]:
    """Schedules with one action of a critical block moved behind its last, or the last moved ahead of others."""
    for first, last in blocks:
        if first == last:
            continue
        stage = graph.stage[first]
        base = graph.first[stage]
        line = list(schedule.actions[stage])
        moves = [(last - base, at) for at in range(last - base - 1, first - base - 1, -1)]
        moves += [(at, last - base) for at in range(last - base - 1, first - base - 1, -1)]
        for source, target in moves[:6]:
            order = line.copy()
            order.insert(target, order.pop(source))
            if _keeps_order(order[min(source, target) : max(source, target) + 1]):
                yield replace(
                    schedule,
                    actions=tuple(tuple(order) if s == stage else mine for s, mine in enumerate(schedule.actions)),
                )


def _keeps_order(part: list[Action]) -> bool:
    """Whether in this part of a stage's list F, then B or I, then W still hold for every chunk and micro-batch."""
    rank = {"F": 0, "I": 1, "B": 1, "W": 2}
    seen: dict[tuple[int, int], int] = {}
    for action in part:
        key = action.chunk, action.microbatch
        if rank[action.kind] < seen.get(key, 0):
            return False
        seen[key] = rank[action.kind]
    return True


def improve(
    schedule: Schedule,
    costs: ChunkCosts,
    edges: Edges,
    *,
    fits: Callable[[Schedule], bool],
    rounds: int,
    bound: float = 0.0,
) -> tuple[float, Schedule]:
    """The schedule after up to ``rounds`` tried changes, and its step time; ends early at the bound.

    Every change is to the order on one stage; one that makes stages wait in a circle shows when it is simulated, and
    is dropped.
    """
    graph = ActionGraph.of(schedule, edges)
    start, end = run_graph(graph, costs)
    best = step_time(schedule, costs, edges)
    while rounds > 0 and best > bound * (1 + 1e-9):
        for changed in _moves(schedule, graph, _critical_blocks(graph, start, end)):
            rounds -= 1
            if fits(changed):
                trial = ActionGraph.of(changed, edges)
                times = run_graph(trial, costs, strict=False)
                if times is not None and max(times[1]) < max(end) * (1 - 1e-9):
                    schedule, graph, (start, end) = changed, trial, times
                    break
            if rounds <= 0:
                break
        else:
            break
    return step_time(schedule, costs, edges), schedule
