"""The messages of a schedule: who sends what to whom, in which order, and the full program of a stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipepart.schedule.actions import Action, Edges, Message, Schedule
from pipepart.schedule.dependencies import ActionGraph

__all__ = ["Lowered", "Program", "channels", "lower", "meetings", "pair_order", "pairs_of", "program"]

Pair = tuple[int, int]
Program = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Lowered:
    """A schedule with its messages, from one run through it."""

    program: Program
    channels: Mapping[Pair, tuple[Message, ...]]
    pair_order: Mapping[Pair, tuple[Message, ...]]


def _receivers(schedule: Schedule, edges: Edges) -> dict[str, list[list[int]]]:
    """Per payload and chunk: the chunks on other stages that its result goes to, nearest first."""
    home = schedule.placement
    ahead: list[list[int]] = [[] for _ in home]
    back: list[list[int]] = [[] for _ in home]
    for source, target in sorted(edges.forward):
        if home[source] != home[target]:
            ahead[source].append(target)
    for source, target in sorted(edges.backward, reverse=True):
        if home[source] != home[target]:
            back[target].append(source)
    return {"F": ahead, "B": back, "I": back}


def meetings(graph: ActionGraph) -> list[list[int]]:
    """Per stage the messages of `lower` in its order, as numbers: message n as n where it is sent, ~n where received."""
    placement = graph.schedule.placement
    receivers = _receivers(graph.schedule, graph.edges)
    receivers["W"] = [[] for _ in placement]
    lists: list[list[int]] = [[] for _ in range(graph.schedule.stages)]
    count = 0
    for n in graph.linear_order():
        action = graph.actions[n]
        for target in receivers[action.kind][action.chunk]:
            lists[graph.stage[n]].append(count)
            lists[placement[target]].append(~count)
            count += 1
    return lists


def lower(graph: ActionGraph) -> Lowered:
    """Messages for the schedule of a graph, all in the order of one run through it (see `program`)."""
    placement = graph.schedule.placement
    receivers = _receivers(graph.schedule, graph.edges)
    lists: list[list[Action]] = [[] for _ in range(graph.schedule.stages)]
    one_way: defaultdict[Pair, list[Message]] = defaultdict(list)
    both_ways: defaultdict[Pair, list[Message]] = defaultdict(list)
    for n in graph.linear_order():
        action, here = graph.actions[n], graph.stage[n]
        lists[here].append(action)
        if action.kind == "W":
            continue
        payload = "F" if action.kind == "F" else "B"
        chunk, k = action.chunk, action.microbatch
        for target in receivers[action.kind][chunk]:
            message = Message(payload, chunk, target, k)
            there = placement[target]
            lists[here].append(Action("SEND", chunk, k, target, payload))
            lists[there].append(Action("RECV", target, k, chunk, payload))
            one_way[here, there].append(message)
            both_ways[(here, there) if here < there else (there, here)].append(message)
    return Lowered(
        tuple(map(tuple, lists)),
        {pair: tuple(one_way[pair]) for pair in sorted(one_way)},
        {pair: tuple(both_ways[pair]) for pair in sorted(both_ways)},
    )


def _lowered(
    schedule: Schedule, forward_edges: Iterable[Pair] | None, backward_edges: Iterable[Pair] | None
) -> Lowered:
    if schedule.forward_only:
        backward_edges = ()
    return lower(ActionGraph.of(schedule, Edges.of(schedule.chunks, forward_edges, backward_edges)))


def channels(
    schedule: Schedule,
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
) -> Mapping[Pair, tuple[Message, ...]]:
    """For each (sender stage, receiver stage) that exchange anything: the messages in the order of their sending.

    Edges are pairs (earlier chunk, later chunk) for both; ``forward_edges`` defaults to the chain and
    ``backward_edges`` to ``forward_edges``. Edges inside one stage have no message.
    """
    return _lowered(schedule, forward_edges, backward_edges).channels


def pair_order(
    schedule: Schedule,
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
) -> Mapping[Pair, tuple[Message, ...]]:
    """For each (lower stage, higher stage): all messages between them, both directions, in one order for both sides.

    For transports where the two ends of a pair must issue their operations in the same order (NCCL). The order is
    that of one run of the whole schedule, so no message waits for a later one.
    """
    return _lowered(schedule, forward_edges, backward_edges).pair_order


def program(
    schedule: Schedule,
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
) -> Program:
    """Per stage: compute, SEND and RECV in one order that even blocking sends (both ends meet) carry out.

    Every stage's list is a part of one global order in which a message is one moment, so none can wait in a circle.
    """
    return _lowered(schedule, forward_edges, backward_edges).program


def pairs_of(program: Sequence[Sequence[Action]], placement: Sequence[int]) -> Mapping[Pair, tuple[Message, ...]]:
    """The messages of a program per (lower stage, higher stage), in the order in which the lower one issues them."""
    found: dict[Pair, list[Message]] = {}
    for stage, actions in enumerate(program):
        for action in actions:
            if action.kind not in ("SEND", "RECV"):
                continue
            assert action.payload is not None
            assert action.peer is not None
            other = placement[action.peer]
            if other > stage:
                ends = (action.chunk, action.peer) if action.kind == "SEND" else (action.peer, action.chunk)
                found.setdefault((stage, other), []).append(Message(action.payload, *ends, action.microbatch))
    return {pair: tuple(found[pair]) for pair in sorted(found)}
