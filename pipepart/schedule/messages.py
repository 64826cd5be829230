"""The messages of a schedule, and the check that explicit messages of a program can be carried out.

Two ways of communicating are checked. *Blocking*: a SEND and its RECV happen at one moment, when both stages have
reached them (rendezvous). *Ordered*: SEND and RECV return at once, but all messages between two stages, both directions
together, are carried out in one order, and a compute action waits for the messages that it uses (a NCCL communicator).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import COMPUTE, MESSAGES, Action, Edges, Message, Schedule
from pipepart.schedule.dependencies import ActionGraph

__all__ = [
    "Messages",
    "Program",
    "all_meet",
    "check_blocking",
    "check_messages",
    "check_ordered",
    "lower",
    "meetings",
    "messages_of",
    "pairs_of",
]

Pair = tuple[int, int]
Program = tuple[tuple[Action, ...], ...]
Lists = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Messages:
    """The messages of a schedule, in the order of one run of the whole schedule, so that none waits for a later one."""

    program: Program
    """Compute, SEND and RECV of each stage, in an order that even blocking sends (both ends meet) carry out.

    Every list is a part of one global order in which a message is one moment, so stages never wait in a circle.
    """
    channels: Mapping[Pair, tuple[Message, ...]]
    """Per (sender stage, receiver stage): the messages in the order of their sending."""
    pair_order: Mapping[Pair, tuple[Message, ...]]
    """Per (lower stage, higher stage): all messages of both directions, in one order for both ends.

    Some transports (NCCL) need both ends of a pair to issue their operations in the same order.
    """


def messages_of(
    schedule: Schedule, forward_edges: Iterable[Pair] | None = None, backward_edges: Iterable[Pair] | None = None
) -> Messages:
    """The messages of a schedule.

    Edges are pairs (earlier chunk, later chunk) for both; ``forward_edges`` defaults to the chain and
    ``backward_edges`` to ``forward_edges``. Edges inside one stage have no message.
    """
    if schedule.forward_only:
        backward_edges = ()
    return lower(ActionGraph.of(schedule, Edges.of(schedule.chunks, forward_edges, backward_edges)))


def _receivers(schedule: Schedule, edges: Edges) -> dict[str, list[list[int]]]:
    """Per kind and chunk: the chunks on other stages that its result goes to, nearest first."""
    home = schedule.placement
    ahead: list[list[int]] = [[] for _ in home]
    back: list[list[int]] = [[] for _ in home]
    for source, target in sorted(edges.forward):
        if home[source] != home[target]:
            ahead[source].append(target)
    for source, target in sorted(edges.backward, reverse=True):
        if home[source] != home[target]:
            back[target].append(source)
    return {"F": ahead, "B": back, "I": back, "W": [[] for _ in home]}


def _deliveries(graph: ActionGraph) -> Iterator[tuple[int, list[int]]]:
    """Every action in the order of one run, with the chunks on other stages that receive its result."""
    receivers = _receivers(graph.schedule, graph.edges)
    for n in graph.linear_order():
        action = graph.actions[n]
        yield n, receivers[action.kind][action.chunk]


def meetings(graph: ActionGraph) -> list[list[int]]:
    """The messages of `lower` per stage, as numbers: message n is n where it is sent and ~n where it is received."""
    lists: list[list[int]] = [[] for _ in range(graph.schedule.stages)]
    count = 0
    for n, targets in _deliveries(graph):
        for target in targets:
            lists[graph.stage[n]].append(count)
            lists[graph.schedule.placement[target]].append(~count)
            count += 1
    return lists


def lower(graph: ActionGraph) -> Messages:
    """The messages for the schedule of a graph."""
    lists: list[list[Action]] = [[] for _ in range(graph.schedule.stages)]
    one_way: defaultdict[Pair, list[Message]] = defaultdict(list)
    both_ways: defaultdict[Pair, list[Message]] = defaultdict(list)
    for n, targets in _deliveries(graph):
        action, here = graph.actions[n], graph.stage[n]
        lists[here].append(action)
        for target in targets:
            message = Message("F" if action.kind == "F" else "B", action.chunk, target, action.microbatch)
            there = graph.schedule.placement[target]
            lists[here].append(message.send)
            lists[there].append(message.recv)
            one_way[here, there].append(message)
            both_ways[min(here, there), max(here, there)].append(message)
    return Messages(
        tuple(map(tuple, lists)),
        {pair: tuple(one_way[pair]) for pair in sorted(one_way)},
        {pair: tuple(both_ways[pair]) for pair in sorted(both_ways)},
    )


def _both_ends(program: Lists, placement: Sequence[int]) -> dict[Pair, tuple[list[Message], list[Message]]]:
    """Per (lower stage, higher stage): the messages as the lower stage issues them, and as the higher one does."""
    ends: dict[Pair, tuple[list[Message], list[Message]]] = {}
    for stage, actions in enumerate(program):
        for action in actions:
            if action.kind in MESSAGES:
                assert action.peer is not None
                other = placement[action.peer]
                pair = min(stage, other), max(stage, other)
                ends.setdefault(pair, ([], []))[stage > other].append(action.message)
    return ends


def pairs_of(program: Lists, placement: Sequence[int]) -> Mapping[Pair, tuple[Message, ...]]:
    """The messages of a program per (lower stage, higher stage), in the order in which the lower one issues them."""
    return {pair: tuple(lower) for pair, (lower, _) in sorted(_both_ends(program, placement).items())}


def check_messages(name: str, program: Lists, placement: Sequence[int], edges: Edges) -> None:
    """Check that every edge between stages has its message per micro-batch, sent after it is made, received before use."""
    computed: dict[tuple[str, int], dict[int, int]] = {(w, c): {} for w in "FBW" for c in range(len(placement))}
    ends: dict[tuple[str, tuple[str, int, int]], dict[int, int]] = {}
    crossing = [("F", *pair) for pair in sorted(edges.forward)] + [("B", b, a) for a, b in sorted(edges.backward)]
    crossing = [edge for edge in crossing if placement[edge[1]] != placement[edge[2]]]
    for edge in crossing:
        ends["SEND", edge], ends["RECV", edge] = {}, {}
    for stage, actions in enumerate(program):
        for at, action in enumerate(actions):
            kind, k = action.kind, action.microbatch
            if kind in MESSAGES:
                message = action.message
                found = ends.get((kind, (message.payload, message.source, message.target)))
                if found is None or placement[action.chunk] != stage:
                    raise ScheduleError(f"{name}: stage {stage} does {action}, but no edge asks for this message here")
                if k in found:
                    raise ScheduleError(f"{name}: stage {stage} does {action} twice")
                found[k] = at
            elif kind in COMPUTE:
                computed["B" if kind == "I" else kind, action.chunk][k] = at
    for edge in crossing:
        way, source, target = edge
        sent, received = ends["SEND", edge], ends["RECV", edge]
        here, there, used = placement[source], placement[target], computed[way, target]
        for k, at in computed[way, source].items():
            message = Message(way, source, target, k)
            lost = f"{name}: message missing: stage"
            if k not in sent:
                raise ScheduleError(f"{lost} {here} never does {message.send} (to stage {there})")
            if k not in received:
                raise ScheduleError(f"{lost} {there} never does {message.recv} (from stage {here})")
            if sent[k] < at:
                raise ScheduleError(f"{name}: stage {here} does {message.send} before {program[here][at]} has made it")
            if k in used and received[k] > used[k]:
                raise ScheduleError(f"{name}: stage {there} does {program[there][used[k]]} before {message.recv}")


def _deadlock(name: str, how: str, waits: Mapping[int, tuple[Action, str]]) -> ScheduleError:
    lines = [f"{name}: deadlock {how}; these stages wait for each other:"]
    lines += [f"  stage {stage}: {action} waits for {other}" for stage, (action, other) in waits.items()]
    return ScheduleError("\n".join(lines))


def _meet(lists: Sequence[Sequence[int]]) -> list[int]:
    """The number of messages of each stage (see `meetings`) that are exchanged if both ends must reach a message."""
    home = {message: stage for stage, mine in enumerate(lists) for message in mine}
    cursor = [0] * len(lists)
    active = list(range(len(lists)))
    while active:
        stage = active.pop()
        mine = lists[stage]
        while cursor[stage] < len(mine):
            facing = ~mine[cursor[stage]]
            other = home.get(facing, stage)
            if other == stage or cursor[other] == len(lists[other]) or lists[other][cursor[other]] != facing:
                break
            cursor[stage] += 1
            cursor[other] += 1
            active.append(other)
    return cursor


def all_meet(lists: Sequence[Sequence[int]]) -> bool:
    """`check_blocking` on numbers (see `meetings`): whether every message is met at both ends, each list in order."""
    return all(at == len(mine) for at, mine in zip(_meet(lists), lists))


def check_blocking(name: str, program: Lists, placement: Sequence[int]) -> None:
    """Check that rendezvous sends carry out the program; the error names the stages and actions that wait."""
    number: dict[Message, int] = {}
    messages = [[action for action in actions if action.kind in MESSAGES] for actions in program]
    lists = []
    for mine in messages:
        numbers = [number.setdefault(action.message, len(number)) for action in mine]
        lists.append([n if action.kind == "SEND" else ~n for n, action in zip(numbers, mine)])
    waits = {}
    for stage, at in enumerate(_meet(lists)):
        if at < len(messages[stage]):
            action = messages[stage][at]
            assert action.peer is not None
            facing = action.message.recv if action.kind == "SEND" else action.message.send
            waits[stage] = action, f"{facing} on stage {placement[action.peer]}"
    if waits:
        raise _deadlock(name, "with blocking sends", waits)


def _one_order(name: str, program: Lists, placement: Sequence[int]) -> dict[Pair, list[Message]]:
    """The messages of each pair of stages, in the order in which both ends issue them; an error if they differ."""
    ends = _both_ends(program, placement)
    for (low, high), (left, right) in ends.items():
        for at, (mine, theirs) in enumerate(zip(left, right)):
            if mine != theirs:
                raise ScheduleError(
                    f"{name}: stages {low} and {high} do not agree on the order of their messages: message {at} is "
                    f"{mine} on stage {low} and {theirs} on stage {high}; over an ordered channel (NCCL) both would "
                    "wait forever; list the messages in one order"
                )
        if len(left) != len(right):
            longer, stage = (left, low) if len(left) > len(right) else (right, high)
            extra = longer[min(len(left), len(right))]
            raise ScheduleError(f"{name}: message {extra} between stages {low} and {high} is on stage {stage} only")
    return {pair: left for pair, (left, _) in ends.items()}


def check_ordered(name: str, program: Lists, placement: Sequence[int]) -> None:
    """Check that both ends of every pair issue the same messages in one order, and that every stage finishes with it."""
    queues = _one_order(name, program, placement)
    inputs: defaultdict[tuple[str, int, int], list[Message]] = defaultdict(list)
    for action in (action for actions in program for action in actions if action.kind == "RECV"):
        inputs[action.message.payload, action.chunk, action.microbatch].append(action.message)
    cursor = [0] * len(program)
    issued: Counter[Message] = Counter()
    head = dict.fromkeys(queues, 0)
    complete: set[Message] = set()

    def missing(action: Action) -> list[Message]:
        used = inputs.get(("B" if action.kind == "I" else action.kind, action.chunk, action.microbatch), ())
        return [message for message in used if message not in complete]

    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(program):
            while cursor[stage] < len(actions):
                action = actions[cursor[stage]]
                if action.kind in MESSAGES:
                    issued[action.message] += 1
                elif missing(action):
                    break
                cursor[stage] += 1
                progress = True
        for pair, queue in queues.items():
            while head[pair] < len(queue) and issued[queue[head[pair]]] == 2:
                complete.add(queue[head[pair]])
                head[pair] += 1
                progress = True
    waits = {}
    for stage, at in enumerate(cursor):
        if at < len(program[stage]):
            message = missing(program[stage][at])[0]
            low, high = sorted((placement[message.source], placement[message.target]))
            first = queues[low, high][head[low, high]]
            behind = "" if first == message else f", which is behind {first} on the channel"
            waits[stage] = program[stage][at], f"{message.recv} from stage {placement[message.source]}{behind}"
    if waits:
        raise _deadlock(name, "with ordered channels", waits)
