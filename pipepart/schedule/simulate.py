"""The event simulator: a schedule and its costs give a timeline."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Action, Edges, Schedule
from pipepart.schedule.chunk_times import ChunkCosts
from pipepart.schedule.dependencies import ActionGraph
from pipepart.schedule.timeline import Event, Timeline

__all__ = ["simulate", "step_time"]


class _Ports:
    """The links of all devices under contention: a stage sends one message at a time and receives one at a time.

    A message starts as soon as both ends are free; of those that wait for the same end, the one that was ready first.
    """

    def __init__(self, stages: int) -> None:
        self.out_busy = [False] * stages
        self.in_busy = [False] * stages
        self.waiting: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        self.of_sender: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        self.of_receiver: list[list[tuple[int, int]]] = [[] for _ in range(stages)]

    def add(self, message: int, sender: int, receiver: int, seconds: float) -> None:
        """A message is ready; messages are numbered in this order."""
        pair = sender, receiver
        if pair not in self.waiting:
            self.waiting[pair] = deque()
            self.of_sender[sender].append(pair)
            self.of_receiver[receiver].append(pair)
        self.waiting[pair].append((message, seconds))

    def start(self, senders: Iterable[int], receivers: Iterable[int]) -> list[tuple[int, float]]:
        """(message, seconds) of all that can start now, where these ends have become free or have something new."""
        begun: list[tuple[int, float]] = []
        pairs = {pair for s in senders for pair in self.of_sender[s]} | {
            pair for r in receivers for pair in self.of_receiver[r]
        }
        while True:
            ready = [
                (self.waiting[pair][0][0], pair)
                for pair in pairs
                if self.waiting[pair] and not self.out_busy[pair[0]] and not self.in_busy[pair[1]]
            ]
            if not ready:
                return begun
            _, (sender, receiver) = min(ready)
            self.out_busy[sender] = self.in_busy[receiver] = True
            begun.append(self.waiting[sender, receiver].popleft())


def _run_graph(
    graph: ActionGraph,
    costs: ChunkCosts,
    scale: Callable[[Action], float] | None = None,
    sends: list[Event] | None = None,
) -> tuple[list[float], list[float]]:
    """Start and end of every action; the events of messages that take time go to ``sends`` if it is given.

    Actions finish in order of time, so that messages ask for their links in order of time. A message is sent as soon
    as its producer has finished; an action starts when its stage is free and all it needs has arrived. An order that
    cannot be carried out is an error.
    """
    schedule, actions, stage_of, first = graph.schedule, graph.actions, graph.stage, graph.first
    table = costs.durations()
    seconds = [table[a.kind][a.chunk] for a in actions]
    before = costs.handling()
    handling = [before[a.kind][a.chunk] for a in actions]
    if scale is not None:
        seconds = [s * scale(a) for s, a in zip(seconds, actions)]
    ports = _Ports(schedule.stages) if costs.contention else None
    moves: list[tuple[int, int]] = []  # under contention: (action that sends, action that receives) of every message
    waiting = [len(need) for need in graph.needs]
    arrived = [0.0] * len(actions)
    start, end = [0.0] * len(actions), [0.0] * len(actions)
    cursor = list(first[:-1])
    free = [0.0] * schedule.stages
    running: list[tuple[float, int]] = []  # (end, action), or (end, -1 - message)

    def begin(stage: int) -> None:
        """Fix the times of a stage's next actions, as far as all they need is known to arrive."""
        n, time = cursor[stage], free[stage]
        while n < first[stage + 1] and not waiting[n]:
            begun = (arrived[n] if arrived[n] > time else time) + handling[n]
            time = begun + seconds[n]
            start[n], end[n] = begun, time
            heapq.heappush(running, (time, n))
            n += 1
        cursor[stage], free[stage] = n, time

    def sent(n: int, user: int, leave: float, arrive: float) -> None:
        if sends is not None:
            payload = "F" if actions[n].kind == "F" else "B"
            move = Action("SEND", actions[n].chunk, actions[n].microbatch, actions[user].chunk, payload)
            sends.append(Event(stage_of[n], move, leave, arrive))

    def start_moves(now: float, senders: Iterable[int], receivers: Iterable[int]) -> None:
        assert ports is not None
        for message, cost in ports.start(senders, receivers):
            heapq.heappush(running, (now + cost, -1 - message))
            sent(*moves[message], now, now + cost)

    for stage in range(schedule.stages):
        begin(stage)
    finished = 0
    while running:
        now, n = heapq.heappop(running)
        if n < 0:
            assert ports is not None
            source, user = moves[-1 - n]
            ports.out_busy[stage_of[source]] = ports.in_busy[stage_of[user]] = False
            start_moves(now, (stage_of[source],), (stage_of[user],))
            waiting[user] -= 1
            arrived[user] = max(arrived[user], now)
            begin(stage_of[user])
            continue
        finished += 1
        stage, action = stage_of[n], actions[n]
        ahead = action.kind == "F"
        asked = False
        for user in graph.users[n]:
            home = stage_of[user]
            when = now
            if home != stage:
                target = actions[user].chunk
                if ahead:
                    cost = costs.send_forward.get((action.chunk, target), 0.0)
                else:
                    cost = costs.send_backward.get((target, action.chunk), 0.0)
                if cost and ports is not None:
                    ports.add(len(moves), stage, home, cost)
                    moves.append((n, user))
                    asked = True
                    continue
                if cost:
                    when = now + cost
                    sent(n, user, now, when)
            waiting[user] -= 1
            if when > arrived[user]:
                arrived[user] = when
            if not waiting[user]:
                begin(home)
        if asked:
            start_moves(now, (stage,), ())
    if finished < len(actions):
        left = {n for s in range(schedule.stages) for n in range(cursor[s], first[s + 1])}
        raise ScheduleError(graph.explain_stall(set(range(len(actions))) - left))
    return start, end


def _reductions(graph: ActionGraph, costs: ChunkCosts, end: list[float]) -> list[Event]:
    """REDUCE events: per stage its chunks as their gradients become final; at the end the tied groups, in their order."""
    schedule = graph.schedule
    final: dict[int, float] = {}
    done = [0.0] * schedule.stages
    for n, action in enumerate(graph.actions):
        if action.kind in ("B", "W"):
            final[action.chunk] = max(final.get(action.chunk, 0.0), end[n])
            done[graph.stage[n]] = max(done[graph.stage[n]], end[n])
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
        start = max(max(done[stage], free[stage]) for stage in stages)
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
    start, end = _run_graph(graph, costs, scale, sends)
    events = [Event(graph.stage[n], action, start[n], end[n]) for n, action in enumerate(graph.actions)]
    events += sends
    events += _reductions(graph, costs, end)
    events.sort(key=attrgetter("start"))
    return Timeline(schedule.stages, tuple(events), graph.edges, costs.activation, costs.kept_for_weight)


def step_time(schedule: Schedule, costs: ChunkCosts, edges: Edges | None = None) -> float:
    """`simulate(...).step_time` without the events: what searches call."""
    graph = _prepare(schedule, costs, edges)
    start, end = _run_graph(graph, costs)
    last = max(end + [event.end for event in _reductions(graph, costs, end)], default=0.0)
    return last - min(start, default=0.0)
