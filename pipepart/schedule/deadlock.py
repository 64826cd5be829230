"""Programs with explicit messages: do sends and receives match, and can every stage come to its end?

Two ways of communicating are tried out. *Blocking*: a SEND and its RECV are one moment, both stages must stand before
them (rendezvous). *Ordered*: SEND and RECV return at once, but what two stages exchange, both directions together,
is carried out in one order, and a compute action waits for what it receives (a NCCL communicator).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import COMPUTE, Action, Edges, Message

__all__ = ["all_meet", "check_blocking", "check_messages", "check_ordered"]

Program = Sequence[Sequence[Action]]
Key = tuple[str, int, int, int]


def _key(action: Action) -> Key:
    """(payload, sending chunk, receiving chunk, micro-batch): equal for the two ends of a message."""
    assert action.payload is not None
    assert action.peer is not None
    if action.kind == "SEND":
        return action.payload, action.chunk, action.peer, action.microbatch
    return action.payload, action.peer, action.chunk, action.microbatch


def check_messages(name: str, program: Program, placement: Sequence[int], edges: Edges) -> None:
    """Every edge between stages has its message for every micro-batch, sent after it is made, received before use."""
    computed: dict[tuple[str, int], dict[int, int]] = {(w, c): {} for w in "FBW" for c in range(len(placement))}
    ends: dict[tuple[str, str, int, int], dict[int, int]] = {}
    for way, pairs in (("F", edges.forward), ("B", edges.backward)):
        for source, target in sorted(pairs):
            if placement[source] != placement[target]:
                here, there = (source, target) if way == "F" else (target, source)
                ends["SEND", way, here, there] = {}
                ends["RECV", way, here, there] = {}
    for stage, actions in enumerate(program):
        for at, action in enumerate(actions):
            kind = action.kind
            if kind == "SEND" or kind == "RECV":
                payload, source, target, k = _key(action)
                found = ends.get((kind, payload, source, target))
                if found is None or placement[action.chunk] != stage:
                    raise ScheduleError(f"{name}: stage {stage} does {action}, but no edge asks for this message here")
                if k in found:
                    raise ScheduleError(f"{name}: stage {stage} does {action} twice")
                found[k] = at
            elif kind in COMPUTE:
                computed["B" if kind == "I" else kind, action.chunk][action.microbatch] = at
    for kind, way, source, target in ends:
        if kind == "RECV":
            continue
        sent, received = ends["SEND", way, source, target], ends["RECV", way, source, target]
        here, there, used = placement[source], placement[target], computed[way, target]
        for k, at in computed[way, source].items():
            message = Message(way, source, target, k)
            if k not in sent:
                raise ScheduleError(
                    f"{name}: message missing: stage {here} never does {message.send} (to stage {there})"
                )
            if k not in received:
                raise ScheduleError(
                    f"{name}: message missing: stage {there} never does {message.recv} (from stage {here})"
                )
            if sent[k] < at:
                raise ScheduleError(f"{name}: stage {here} does {message.send} before {program[here][at]} has made it")
            if k in used and received[k] > used[k]:
                raise ScheduleError(f"{name}: stage {there} does {program[there][used[k]]} before {message.recv}")


def _stuck(name: str, how: str, program: Program, cursor: Sequence[int], waits: Mapping[int, str]) -> str:
    lines = [f"{name}: deadlock {how}; these stages wait for each other:"]
    for stage, at in enumerate(cursor):
        if at < len(program[stage]):
            lines.append(f"  stage {stage}: {program[stage][at]} waits for {waits[stage]}")
    return "\n".join(lines)


def check_blocking(name: str, program: Program, placement: Sequence[int]) -> None:
    """Carry the program out with rendezvous sends; an error that names the stages and actions if it stops."""
    cursor = [0] * len(program)
    active = list(range(len(program)))
    while active:
        stage = active.pop()
        actions = program[stage]
        while cursor[stage] < len(actions):
            action = actions[cursor[stage]]
            if action.kind in ("SEND", "RECV"):
                assert action.peer is not None
                other = placement[action.peer]
                if cursor[other] == len(program[other]):
                    break
                facing = program[other][cursor[other]]
                opposite = "RECV" if action.kind == "SEND" else "SEND"
                if facing.kind != opposite or _key(facing) != _key(action):
                    break
                cursor[other] += 1
                active.append(other)
            cursor[stage] += 1
    if any(at < len(actions) for at, actions in zip(cursor, program)):
        waits = {}
        for stage, at in enumerate(cursor):
            if at < len(program[stage]):
                action = program[stage][at]
                assert action.peer is not None
                other, message = placement[action.peer], Message(*_key(action))
                facing = message.recv if action.kind == "SEND" else message.send
                waits[stage] = f"{facing} on stage {other}"
        raise ScheduleError(_stuck(name, "with blocking sends", program, cursor, waits))


def all_meet(lists: Sequence[Sequence[int]]) -> bool:
    """`check_blocking` on numbers (see `meetings`): whether every message is met at both ends, each list in order."""
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
    return all(at == len(mine) for at, mine in zip(cursor, lists))


def check_ordered(name: str, program: Program, placement: Sequence[int]) -> None:
    """Both ends of every pair issue the same messages in the same order, and with that order every stage ends."""
    queues: dict[tuple[int, int], tuple[list[Key], list[Key]]] = {}
    inputs: dict[tuple[str, int, int], list[Key]] = {}
    for stage, actions in enumerate(program):
        for action in actions:
            if action.kind in ("SEND", "RECV"):
                assert action.peer is not None
                other = placement[action.peer]
                low, high = min(stage, other), max(stage, other)
                key = _key(action)
                queues.setdefault((low, high), ([], []))[stage == high].append(key)
                if action.kind == "RECV":
                    inputs.setdefault((key[0], key[2], key[3]), []).append(key)
    for (low, high), (left, right) in queues.items():
        for at, (mine, theirs) in enumerate(zip(left, right)):
            if mine != theirs:
                raise ScheduleError(
                    f"{name}: stages {low} and {high} do not agree on the order of what they exchange: message "
                    f"{at} is {Message(*mine)} on stage {low} and {Message(*theirs)} on stage {high}; "
                    "over an ordered channel (NCCL) both would wait for ever"
                )
        if len(left) != len(right):
            longer, stage = (left, low) if len(left) > len(right) else (right, high)
            extra = Message(*longer[min(len(left), len(right))])
            raise ScheduleError(f"{name}: message {extra} between stages {low} and {high} is on stage {stage} only")
    cursor = [0] * len(program)
    issued: dict[Key, int] = {}
    head = dict.fromkeys(queues, 0)
    complete: set[Key] = set()

    def missing(action: Action) -> list[Key]:
        used = ("B" if action.kind == "I" else action.kind, action.chunk, action.microbatch)
        return [key for key in inputs.get(used, ()) if key not in complete]

    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(program):
            while cursor[stage] < len(actions):
                action = actions[cursor[stage]]
                if action.kind in ("SEND", "RECV"):
                    issued[_key(action)] = issued.get(_key(action), 0) + 1
                elif missing(action):
                    break
                cursor[stage] += 1
                progress = True
        for pair, (left, _) in queues.items():
            while head[pair] < len(left) and issued.get(left[head[pair]], 0) == 2:
                complete.add(left[head[pair]])
                head[pair] += 1
                progress = True
    if any(at < len(actions) for at, actions in zip(cursor, program)):
        waits = {}
        for stage, at in enumerate(cursor):
            if at < len(program[stage]):
                message = Message(*missing(program[stage][at])[0])
                low, high = sorted((placement[message.source], placement[message.target]))
                first = Message(*queues[low, high][0][head[low, high]])
                behind = "" if first == message else f", which is behind {first} on the channel"
                waits[stage] = f"{message.recv} from stage {placement[message.source]}{behind}"
        raise ScheduleError(_stuck(name, "with ordered channels", program, cursor, waits))
