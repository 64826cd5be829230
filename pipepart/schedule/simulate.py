"""The event simulator: a schedule and its costs give a timeline."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Action, Edges, Schedule
from pipepart.schedule.chunk_costs import ChunkCosts
from pipepart.schedule.dependencies import ActionGraph
from pipepart.schedule.timeline import Event, Timeline

__all__ = ["simulate", "step_time"]


class _Ports:
    """The links of all stages under contention: a stage sends one message at a time and receives one at a time.

    A message starts as soon as both ends are free; of those that wait for the same end, the one that was ready first.
    """

    def __init__(self, stages: int) -> None:
        self.moves: list[tuple[int, int]] = []
        """(action that sends, action that receives) of every message, in the order in which they became ready."""
        self._out_busy = [False] * stages
        self._in_busy = [False] * stages
        self._waiting: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        self._of_sender: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        self._of_receiver: list[list[tuple[int, int]]] = [[] for _ in range(stages)]

    def add(self, move: tuple[int, int], sender: int, receiver: int, seconds: float) -> None:
        """Add a message that is ready."""
        pair = sender, receiver
        if pair not in self._waiting:
            self._waiting[pair] = deque()
            self._of_sender[sender].append(pair)
            self._of_receiver[receiver].append(pair)
        self._waiting[pair].append((len(self.moves), seconds))
        self.moves.append(move)

    def release(self, sender: int, receiver: int) -> None:
        """Free both ends of a message that has arrived."""
        self._out_busy[sender] = self._in_busy[receiver] = False

    def start(self, senders: Iterable[int], receivers: Iterable[int]) -> list[tuple[int, float]]:
        """(message, seconds) of all that can start now, if these ends have become free or have a new message."""
        begun: list[tuple[int, float]] = []
        pairs = {pair for s in senders for pair in self._of_sender[s]}
        pairs |= {pair for r in receivers for pair in self._of_receiver[r]}
        while True:
            ready = [
                (self._waiting[pair][0][0], pair)
                for pair in pairs
                if self._waiting[pair] and not self._out_busy[pair[0]] and not self._in_busy[pair[1]]
            ]
            if not ready:
                return begun
            _, (sender, receiver) = min(ready)
            self._out_busy[sender] = self._in_busy[receiver] = True
            begun.append(self._waiting[sender, receiver].popleft())


class _Run:
    """One run of a graph: start and end of every action.

    Actions finish in order of time, so that messages ask for their links in order of time. A message is sent as soon
    as its producer has finished; an action starts when its stage is free and all its inputs have arrived.
    """

    def __init__(
        self, graph: ActionGraph, costs: ChunkCosts, scale: Callable[[Action], float] | None, sends: list[Event] | None
    ) -> None:
        self.graph, self.costs, self.sends = graph, costs, sends
        durations, handling = costs.durations(), costs.handling()
        self.seconds = [durations[a.kind][a.chunk] for a in graph.actions]
        self.handling = [handling[a.kind][a.chunk] for a in graph.actions]
        if scale is not None:
            self.seconds = [s * scale(a) for s, a in zip(self.seconds, graph.actions)]
        self.ports = _Ports(graph.schedule.stages) if costs.contention else None
        self.waiting = [len(need) for need in graph.needs]
        self.arrived = [0.0] * len(graph.actions)
        self.start, self.end = [0.0] * len(graph.actions), [0.0] * len(graph.actions)
        self.cursor = list(graph.first[:-1])
        self.free = [0.0] * graph.schedule.stages
        self.running: list[tuple[float, int]] = []
        """(end, action), or (end, -1 - message)."""

    def run(self) -> tuple[list[float], list[float]]:
        """Start and end of every action. Raises an error for an order that cannot be carried out."""
        graph = self.graph
        for stage in range(graph.schedule.stages):
            self._begin(stage)
        finished = 0
        while self.running:
            now, n = heapq.heappop(self.running)
            if n >= 0:
                finished += 1
                self._finish(n, now)
            else:
                self._arrive(-1 - n, now)
        if finished < len(graph.actions):
            left = {n for s in range(graph.schedule.stages) for n in range(self.cursor[s], graph.first[s + 1])}
            raise ScheduleError(graph.explain_stall(set(range(len(graph.actions))) - left))
        return self.start, self.end

    def _begin(self, stage: int) -> None:
        """Fix the times of a stage's next actions, as far as the arrival of all their inputs is known."""
        n, time, last = self.cursor[stage], self.free[stage], self.graph.first[stage + 1]
        while n < last and not self.waiting[n]:
            begun = (self.arrived[n] if self.arrived[n] > time else time) + self.handling[n]
            time = begun + self.seconds[n]
            self.start[n], self.end[n] = begun, time
            heapq.heappush(self.running, (time, n))
            n += 1
        self.cursor[stage], self.free[stage] = n, time

    def _finish(self, n: int, now: float) -> None:
        """Send the result of an action to its users."""
        stage_of, actions, waiting, arrived = self.graph.stage, self.graph.actions, self.waiting, self.arrived
        stage, chunk, ahead = stage_of[n], actions[n].chunk, actions[n].kind == "F"
        queued = False
        for user in self.graph.users[n]:
            home, when = stage_of[user], now
            if home != stage:
                target = actions[user].chunk
                if ahead:
                    cost = self.costs.send_forward.get((chunk, target), 0.0)
                else:
                    cost = self.costs.send_backward.get((target, chunk), 0.0)
                if cost and self.ports is not None:
                    self.ports.add((n, user), stage, home, cost)
                    queued = True
                    continue
                if cost:
                    when = now + cost
                    self._record(n, user, now, when)
            waiting[user] -= 1
            if when > arrived[user]:
                arrived[user] = when
            if not waiting[user]:
                self._begin(home)
        if queued:
            self._start_messages(now, (stage,), ())

    def _arrive(self, message: int, now: float) -> None:
        """Deliver a message under contention, and start the messages that waited for its link."""
        assert self.ports is not None
        source, user = self.ports.moves[message]
        sender, receiver = self.graph.stage[source], self.graph.stage[user]
        self.ports.release(sender, receiver)
        self._start_messages(now, (sender,), (receiver,))
        self.waiting[user] -= 1
        self.arrived[user] = max(self.arrived[user], now)
        self._begin(receiver)

    def _start_messages(self, now: float, senders: Iterable[int], receivers: Iterable[int]) -> None:
        assert self.ports is not None
        for message, cost in self.ports.start(senders, receivers):
            heapq.heappush(self.running, (now + cost, -1 - message))
            self._record(*self.ports.moves[message], now, now + cost)

    def _record(self, n: int, user: int, leave: float, arrive: float) -> None:
        """Add the event of a message that takes time, if events are asked for."""
        if self.sends is not None:
            actions = self.graph.actions
            payload = "F" if actions[n].kind == "F" else "B"
            move = Action("SEND", actions[n].chunk, actions[n].microbatch, actions[user].chunk, payload)
            self.sends.append(Event(self.graph.stage[n], move, leave, arrive))


def _reductions(graph: ActionGraph, costs: ChunkCosts, end: list[float]) -> list[Event]:
    """REDUCE events: the chunks of each stage as their gradients become final, then the tied groups in their order."""
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
    """The timeline of a schedule: start and end of every action.

    ``edges`` defaults to those that have a cost, and to the plain chain if none has. ``scale`` multiplies the time
    of single actions, for example for jitter or one slow micro-batch.
    """
    graph = _prepare(schedule, costs, edges)
    sends: list[Event] = []
    start, end = _Run(graph, costs, scale, sends).run()
    events = [Event(graph.stage[n], action, start[n], end[n]) for n, action in enumerate(graph.actions)]
    events += sends
    events += _reductions(graph, costs, end)
    events.sort(key=attrgetter("start"))
    return Timeline(schedule.stages, tuple(events), graph.edges, costs.activation, costs.kept_for_weight)


def step_time(schedule: Schedule, costs: ChunkCosts, edges: Edges | None = None) -> float:
    """The same as `simulate(...).step_time`, faster, since it makes no events."""
    graph = _prepare(schedule, costs, edges)
    start, end = _Run(graph, costs, None, None).run()
    last = max(end + [event.end for event in _reductions(graph, costs, end)], default=0.0)
    return last - min(start, default=0.0)
