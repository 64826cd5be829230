"""The event simulator: a schedule and its costs give a timeline."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, overload

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Action, Edges, Schedule
from pipepart.schedule.costs import ChunkCosts
from pipepart.schedule.dependencies import ActionGraph
from pipepart.schedule.timeline import Event, Timeline

__all__ = ["run_graph", "simulate", "step_time"]


@dataclass
class _Links:
    """When messages arrive. With contention a stage's outgoing and incoming port carry one message at a time."""

    contention: bool
    out_free: list[float]
    in_free: list[float]

    def arrival(self, ready: float, sender: int, receiver: int, seconds: float) -> tuple[float, float]:
        if not self.contention:
            return ready, ready + seconds
        start = max(ready, self.out_free[sender], self.in_free[receiver])
        self.out_free[sender] = self.in_free[receiver] = start + seconds
        return start, start + seconds


@overload
def run_graph(
    graph: ActionGraph,
    costs: ChunkCosts,
    scale: Callable[[Action], float] | None = ...,
    sends: list[Event] | None = ...,
    strict: Literal[True] = ...,
) -> tuple[list[float], list[float]]: ...
@overload
def run_graph(
    graph: ActionGraph,
    costs: ChunkCosts,
    scale: Callable[[Action], float] | None = ...,
    sends: list[Event] | None = ...,
    *,
    strict: bool,
) -> tuple[list[float], list[float]] | None: ...
def run_graph(
    graph: ActionGraph,
    costs: ChunkCosts,
    scale: Callable[[Action], float] | None = None,
    sends: list[Event] | None = None,
    strict: bool = True,
) -> tuple[list[float], list[float]] | None:
    """Start and end of every action; the events of messages that take time go to ``sends`` if it is given.

    Actions finish in order of time, so that messages ask for their links in order of time. A message is sent as soon
    as its producer has finished; an action starts when its stage is free and all it needs has arrived. An order that
    cannot be carried out is an error, or None if not ``strict``.
    """
    schedule, actions, stage_of, first = graph.schedule, graph.actions, graph.stage, graph.first
    table = costs.durations()
    seconds = [table[a.kind][a.chunk] for a in actions]
    if scale is not None:
        seconds = [s * scale(a) for s, a in zip(seconds, actions)]
    links = _Links(costs.contention, [0.0] * schedule.stages, [0.0] * schedule.stages)
    waiting = [len(need) for need in graph.needs]
    arrived = [0.0] * len(actions)
    start, end = [0.0] * len(actions), [0.0] * len(actions)
    cursor = list(first[:-1])
    free = [0.0] * schedule.stages
    running: list[tuple[float, int]] = []

    def begin(stage: int) -> None:
        """Fix the times of a stage's next actions, as far as all they need is known to arrive."""
        n, time = cursor[stage], free[stage]
        while n < first[stage + 1] and not waiting[n]:
            begun = arrived[n] if arrived[n] > time else time
            time = begun + seconds[n]
            start[n], end[n] = begun, time
            heapq.heappush(running, (time, n))
            n += 1
        cursor[stage], free[stage] = n, time

    for stage in range(schedule.stages):
        begin(stage)
    finished = 0
    while running:
        now, n = heapq.heappop(running)
        finished += 1
        stage, action = stage_of[n], actions[n]
        woken = set()
        sent: dict[int, float] = {}
        for user in graph.users[n]:
            home, target = stage_of[user], actions[user].chunk
            when = now
            if home != stage:
                if target not in sent:
                    if action.kind == "F":
                        cost = costs.send_forward.get((action.chunk, target), 0.0)
                    else:
                        cost = costs.send_backward.get((target, action.chunk), 0.0)
                    if cost:
                        leave, sent[target] = links.arrival(now, stage, home, cost)
                    else:
                        leave = sent[target] = now
                    if cost and sends is not None:
                        payload = "F" if action.kind == "F" else "B"
                        move = Action("SEND", action.chunk, action.microbatch, target, payload)
                        sends.append(Event(stage, move, leave, sent[target]))
                when = sent[target]
            woken.add(home)
            waiting[user] -= 1
            if when > arrived[user]:
                arrived[user] = when
        for other in woken:
            begin(other)
    if finished < len(actions):
        if not strict:
            return None
        left = {n for s in range(schedule.stages) for n in range(cursor[s], first[s + 1])}
        raise ScheduleError(graph.explain_stall(set(range(len(actions))) - left))
    return start, end


def _reductions(graph: ActionGraph, costs: ChunkCosts, end: list[float]) -> list[Event]:
    """REDUCE events: per stage its chunks as their gradients become final; then the tied groups, in their order."""
    schedule = graph.schedule
    final: dict[int, float] = {}
    for n, action in enumerate(graph.actions):
        if action.kind in ("B", "W"):
            final[action.chunk] = max(final.get(action.chunk, 0.0), end[n])
    free = [0.0] * schedule.stages
    events = []
    for chunk in sorted(final, key=lambda c: (final[c], c)):
        if costs.reduce[chunk]:
            stage = schedule.placement[chunk]
            start = max(final[chunk], free[stage])
            free[stage] = start + costs.reduce[chunk]
            events.append(Event(stage, Action("REDUCE", chunk, schedule.microbatches - 1), start, free[stage]))
    for group, seconds in zip(graph.edges.tied, costs.reduce_tied):
        stages = sorted({schedule.placement[chunk] for chunk in group})
        if len(stages) < 2 or not seconds or any(chunk not in final for chunk in group):
            continue
        start = max([final[chunk] for chunk in group] + [free[stage] for stage in stages])
        for stage in stages:
            chunk = next(c for c in group if schedule.placement[c] == stage)
            free[stage] = start + seconds
            events.append(Event(stage, Action("REDUCE", chunk, schedule.microbatches - 1), start, free[stage]))
    return events


def _prepare(schedule: Schedule, costs: ChunkCosts, edges: Edges | None) -> ActionGraph:
    if costs.chunks != schedule.chunks:
        raise ScheduleError(
            f"{schedule.name}: the schedule has {schedule.chunks} chunks, the costs have {costs.chunks}; "
            "give one entry per chunk, not per stage"
        )
    return ActionGraph.of(schedule, costs.edges if edges is None else edges)


def simulate(
    schedule: Schedule,
    costs: ChunkCosts,
    edges: Edges | None = None,
    *,
    scale: Callable[[Action], float] | None = None,
) -> Timeline:
    """When every action of a schedule starts and ends.

    ``edges`` defaults to those that have a cost, and to the plain chain if none has. ``scale`` multiplies the time
    of single actions: jitter, or one slow micro-batch.
    """
    graph = _prepare(schedule, costs, edges)
    sends: list[Event] = []
    start, end = run_graph(graph, costs, scale, sends)
    events = [Event(graph.stage[n], action, start[n], end[n]) for n, action in enumerate(graph.actions)]
    events += sends
    events += _reductions(graph, costs, end)
    events.sort(key=attrgetter("start"))
    return Timeline(schedule.stages, tuple(events), graph.edges, costs.activation, costs.kept_for_weight)


def step_time(schedule: Schedule, costs: ChunkCosts, edges: Edges | None = None) -> float:
    """`simulate(...).step_time` without the events: what searches call."""
    graph = _prepare(schedule, costs, edges)
    _, end = run_graph(graph, costs)
    return max(end + [event.end for event in _reductions(graph, costs, end)], default=0.0)
