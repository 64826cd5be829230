"""The messages of a schedule: who sends what to whom, in which order, and the full program of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipepart.schedule.actions import Action, Edges, Message, Schedule
from pipepart.schedule.dependencies import ActionGraph

__all__ = ["Program", "channels", "pair_order", "pairs_of", "program"]

Pair = tuple[int, int]
Program = tuple[tuple[Action, ...], ...]


def _edges(
    schedule: Schedule, forward_edges: Iterable[Pair] | None, backward_edges: Iterable[Pair] | None
) -> tuple[Edges, dict[int, list[int]], dict[int, list[int]]]:
    """Checked edges, and per chunk the receivers on other stages of its activations and of its gradients."""
    edges = Edges.of(schedule.chunks, forward_edges, backward_edges)
    home = schedule.placement
    ahead: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    for source, target in sorted(edges.forward):
        if home[source] != home[target]:
            ahead.setdefault(source, []).append(target)
    for source, target in sorted(edges.backward, reverse=True):
        if home[source] != home[target]:
            back.setdefault(target, []).append(source)
    return edges, ahead, back


def _emitted(action: Action, ahead: dict[int, list[int]], back: dict[int, list[int]]) -> list[Message]:
    """The messages that leave when an action has finished: to the nearest chunk first."""
    chunk, k = action.chunk, action.microbatch
    if action.kind == "F":
        return [Message("F", chunk, target, k) for target in ahead.get(chunk, ())]
    if action.kind in ("B", "I"):
        return [Message("B", chunk, source, k) for source in back.get(chunk, ())]
    return []


def channels(
    schedule: Schedule,
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
) -> Mapping[Pair, tuple[Message, ...]]:
    """For each (sender stage, receiver stage) that exchange anything: the messages in the order of their sending.

    Edges are pairs (earlier chunk, later chunk) for both; ``forward_edges`` defaults to the chain and
    ``backward_edges`` to ``forward_edges``. Edges inside one stage have no message.
    """
    _, ahead, back = _edges(schedule, forward_edges, backward_edges)
    found: dict[Pair, list[Message]] = {}
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            for message in _emitted(action, ahead, back):
                found.setdefault((stage, schedule.placement[message.target]), []).append(message)
    return {pair: tuple(found[pair]) for pair in sorted(found)}


def pair_order(
    schedule: Schedule,
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
) -> Mapping[Pair, tuple[Message, ...]]:
    """For each (lower stage, higher stage): all messages between them, both directions, in one order for both sides.

    For transports where the two ends of a pair must issue their operations in the same order (NCCL). The order is
    that of one run of the whole schedule, so no message waits for a later one.
    """
    return pairs_of(program(schedule, forward_edges, backward_edges), schedule.placement)


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


def program(
    schedule: Schedule,
    forward_edges: Iterable[Pair] | None = None,
    backward_edges: Iterable[Pair] | None = None,
    *,
    graph: ActionGraph | None = None,
) -> Program:
    """Per stage: compute, SEND and RECV in one order that even blocking sends (both ends meet) carry out.

    Every stage's list is a part of one global order in which a message is one moment, so none can wait in a circle.
    """
    edges, ahead, back = _edges(schedule, forward_edges, backward_edges)
    graph = ActionGraph.of(schedule, edges) if graph is None else graph
    lists: list[list[Action]] = [[] for _ in range(schedule.stages)]
    for n in graph.linear_order():
        lists[graph.stage[n]].append(graph.actions[n])
        for message in _emitted(graph.actions[n], ahead, back):
            lists[graph.stage[n]].append(message.send)
            lists[schedule.placement[message.target]].append(message.recv)
    return tuple(map(tuple, lists))
