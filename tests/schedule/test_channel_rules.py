"""Posts and waits of hosts under the rules of NCCL: orders that hang are found and named, and others end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart.errors import ScheduleError
from pipepart.schedule import SCHEDULES, Action, Message, make_schedule, messages_of
from pipepart.schedule.channel_programs import channel_programs, check_channels, receives_due, set_up_posts
from pipepart.schedule.channel_rules import (
    RULES,
    Compute,
    Control,
    Entry,
    HostWait,
    Order,
    Post,
    Stuck,
    Sync,
    check_posts,
)


def send(number: int, peer: int, message: Message | None = None, size: int = 4) -> Post:
    return Post(number, "send", peer, size, message.send if message else None)


def recv(number: int, peer: int, message: Message | None = None, size: int = 4) -> Post:
    return Post(number, "recv", peer, size, message.recv if message else None)


def forward(microbatch: int, source: int = 0, target: int = 1) -> Message:
    return Message("F", source, target, microbatch)


def work(chunk: int, microbatch: int = 0) -> Compute:
    return Compute(Action("F", chunk, microbatch))


def verdicts(programs: list[list[Entry]]) -> dict[str, bool]:
    """Whether the programs end, by rule."""
    found = {rule: check_posts(programs, rule) is None for rule in RULES}
    return found | {"shared": check_posts(programs, "eager", shared=True) is None}


def hang(programs: list[list[Entry]], rule: str, **options: bool) -> Stuck:
    found = check_posts(programs, rule, **options)
    assert found is not None
    return found


# ---- five planted orders, one for each cause


def test_crossing_first_uses_hang_while_communicators_are_made():
    there, back = forward(0), Message("B", 1, 0, 0)
    crossing: list[list[Entry]] = [[send(0, 1, there), recv(1, 1, back)], [send(0, 0, back), recv(1, 0, there)]]
    assert verdicts(crossing) == {"lazy": False, "eager": True, "one_queue": True, "shared": True}
    found = hang(crossing, "lazy")
    assert [(rank.rank, rank.host.channel, rank.host.action, rank.device) for rank in found.ranks if rank.host] == [
        (0, (0, 1), there.send, None),
        (1, (1, 0), back.send, None),
    ]
    assert "Rank 0: its host waits for the communicator of the channel 0 -> 1 at its first use" in found.describe()
    ready = [set_up_posts(stage, [(0, 1), (1, 0)]) for stage in (0, 1)]  # made before, in one order
    later = [[send(7, 1, there), recv(8, 1, back)], [send(7, 0, back), recv(8, 0, there)]]
    assert all(verdicts([[*a, *b] for a, b in zip(ready, later)]).values())


def test_a_shared_communicator_with_crossing_orders_hangs():
    near, far = forward(0, 1, 2), forward(0, 0, 2)
    programs: list[list[Entry]] = [
        [send(0, 2, far), Order(0), send(1, 1, forward(0)), Order(1)],
        [recv(0, 0, forward(0)), Order(0), work(1), send(1, 2, near), Order(1)],
        [recv(0, 1, near), recv(1, 0, far), Order(0), Order(1), work(2)],
    ]
    assert verdicts(programs) == {"lazy": False, "eager": True, "one_queue": True, "shared": False}
    found = hang(programs, "eager", shared=True)
    assert [rank.rank for rank in found.ranks] == [0, 1, 2]
    assert found.ranks[0].device is not None
    assert found.ranks[0].device.action == far.send
    assert "stage 2 has RECV F 1>2 .0 on the channel 1 -> 2" in found.ranks[0].device.because
    assert found.ranks[1].host is None, "the host of rank 1 has posted everything"


def test_two_receives_posted_ahead_hang_with_one_queue():
    """The second receive of rank 1 blocks its queue, and behind it is the send that rank 0 needs first."""
    answer = Message("B", 1, 0, 0)
    ready = [set_up_posts(stage, [(0, 1), (1, 0)]) for stage in (0, 1)]
    first = [*ready[0], recv(2, 1, answer), Order(2), send(3, 1, forward(0)), send(4, 1, forward(1))]
    one_ahead = [recv(2, 0, forward(0)), send(3, 0, answer), Order(2), recv(4, 0, forward(1)), work(1), Order(4)]
    two_ahead = [recv(2, 0, forward(0)), recv(4, 0, forward(1)), send(3, 0, answer), Order(2), work(1), Order(4)]
    assert all(verdicts([first, [*ready[1], *one_ahead]]).values())
    programs = [first, [*ready[1], *two_ahead]]
    assert verdicts(programs) == {"lazy": True, "eager": True, "one_queue": False, "shared": True}
    found = hang(programs, "one_queue")
    assert [(rank.rank, rank.host) for rank in found.ranks] == [(0, None), (1, None)], "both hosts have gone on"
    assert [(rank.device.channel, rank.device.action) for rank in found.ranks if rank.device] == [
        ((1, 0), answer.recv),
        ((0, 1), forward(1).recv),
    ]
    text = found.describe()
    assert "Rank 0: its host has done its part; its device waits for the end of RECV B 1>0 .0" in text
    assert "which blocks its one queue until RECV F 0>1 .0 on the channel 0 -> 1 has ended" in text


def test_a_host_that_waits_for_a_message_of_a_waiting_host():
    programs: list[list[Entry]] = [
        [Control("recv", 1, 0), send(0, 1, forward(0))],
        [recv(0, 0, forward(0)), HostWait(0), Control("send", 0, 0)],
    ]
    assert not any(verdicts(programs).values())
    found = hang(programs, "eager")
    assert [rank.host.channel for rank in found.ranks if rank.host] == [(1, 0), (0, 1)]
    assert "message 0 in host memory from stage 1: the host of stage 1 has not sent it" in found.describe()
    assert "the end of RECV F 0>1 .0 on the channel 0 -> 1: the host of stage 0 has not posted" in found.describe()
    programs[1] = [recv(0, 0, forward(0)), Control("send", 0, 0), HostWait(0)]
    assert verdicts(programs) == {"lazy": False, "eager": True, "one_queue": True, "shared": True}


@pytest.mark.parametrize("known", [True, False], ids=["by their messages", "by their sizes"])
def test_sends_in_another_order_than_the_receives(known: bool):
    a, b = (forward(0), forward(1)) if known else (None, None)
    sizes = (4, 4) if known else (4, 8)
    programs: list[list[Entry]] = [
        [send(0, 1, a, sizes[0]), send(1, 1, b, sizes[1]), Order(0), Order(1)],
        [recv(0, 0, b, sizes[1]), recv(1, 0, a, sizes[0]), Order(0), Order(1)],
    ]
    assert not any(verdicts(programs).values())
    text = hang(programs, "eager").describe()
    assert ("stage 1 has RECV F 0>1 .1" if known else "stage 1 has recv 0 on the channel 0 -> 1 (8 bytes)") in text
    programs[1] = [recv(0, 0, a, sizes[0]), recv(1, 0, b, sizes[1]), Order(0), Order(1)]
    assert all(verdicts(programs).values())


# ---- the rules


def test_a_transfer_starts_after_the_compute_that_was_queued_before_it():
    """The receive of rank 1 is behind a wait for the message that rank 0 sends after it."""
    late: list[list[Entry]] = [
        [send(0, 1, forward(0)), Order(0), send(1, 2, forward(0, 0, 2)), Order(1)],
        [recv(0, 2, forward(0, 2, 1)), Order(0), recv(1, 0, forward(0)), Order(1)],
        [recv(0, 0, forward(0, 0, 2)), Order(0), send(1, 1, forward(0, 2, 1)), Order(1)],
    ]
    assert not any(verdicts(late).values())
    late[1] = [recv(1, 0, forward(0)), recv(0, 2, forward(0, 2, 1)), Order(0), Order(1)]
    assert verdicts(late)["one_queue"]


def test_a_host_waits_for_all_compute_and_not_for_transfers_behind_it():
    programs: list[list[Entry]] = [
        [recv(0, 1), work(0), Sync(), Control("send", 1, 0)],
        [Control("recv", 0, 0), send(0, 0)],
    ]
    found = verdicts(programs)
    assert (found["eager"], found["one_queue"]) == (True, True)
    programs[0].insert(1, Order(0))
    assert not verdicts(programs)["eager"]
    assert "its host waits for its device (an op needs a value)" in hang(programs, "one_queue").describe()


def test_a_transfer_that_nobody_waits_for_must_end_as_well():
    found = hang([[send(0, 1, forward(0))], []], "eager")
    assert [rank.rank for rank in found.ranks] == [0]
    assert found.ranks[0].transfers[0].action == forward(0).send
    assert "Open: the end of SEND F 0>1 .0" in found.describe()


def test_wrong_programs_are_refused():
    with pytest.raises(
        ScheduleError, match=r"rank 0, entry 0: Order\(number=3\) waits for a transfer that was not posted"
    ):
        check_posts([[Order(3)]], "eager")
    with pytest.raises(ScheduleError, match="expected one of"):
        check_posts([], "lazy", shared=True)


# ---- against a plain reference


@st.composite
def programs_of_three(draw: st.DrawFn) -> list[list[Entry]]:
    """Random messages between three ranks: each rank posts its ends nearly in one order and waits somewhere later."""
    pairs = st.sampled_from([(a, b) for a in range(3) for b in range(3) if a != b])
    messages = draw(st.lists(pairs, min_size=1, max_size=7))
    programs: list[list[Entry]] = []
    for rank in range(3):
        mine: list[Entry] = []
        for number, (source, target) in enumerate(messages):
            if rank in (source, target):
                posted = (
                    send(number, target, size=number % 2) if rank == source else recv(number, source, size=number % 2)
                )
                mine.insert(draw(st.integers(max(0, len(mine) - 2), len(mine))), posted)
        for entry in [entry for entry in mine if isinstance(entry, Post)]:
            wait = draw(st.sampled_from([Order, Order, HostWait, None]))
            if wait is not None:
                mine.insert(draw(st.integers(mine.index(entry) + 1, len(mine))), wait(entry.number))
        if draw(st.booleans()):
            mine.insert(draw(st.integers(0, len(mine))), Sync())
        programs.append(mine)
    return programs


def _ends(programs: list[list[Entry]], rule: str, shared: bool) -> bool:
    """The rules once more, by scanning everything until nothing changes."""
    host = [0] * len(programs)
    device = [0] * len(programs)
    done: set[tuple[int, int]] = set()
    met: set[tuple[int, int, int]] = set()

    def comm(rank: int, post: Post) -> object:
        pair = (rank, post.peer) if post.kind == "send" else (post.peer, rank)
        return pair if not shared else pair[0] < pair[1]

    def first(rank: int, post: Post) -> bool:
        before = programs[rank][: programs[rank].index(post)]
        return all(
            (rank, e.number) in done for e in before if isinstance(e, Post) and comm(rank, e) == comm(rank, post)
        )

    def passes(rank: int, entry: Entry) -> bool:
        if isinstance(entry, Post):
            return rule != "one_queue" or first(rank, entry)
        return not isinstance(entry, Order) or (rank, entry.number) in done

    def goes_on(rank: int, entry: Entry) -> bool:
        if isinstance(entry, Post) and rule == "lazy":
            source, target = (rank, entry.peer) if entry.kind == "send" else (entry.peer, rank)
            met.add((source, target, rank))
            return (source, target, entry.peer) in met
        if isinstance(entry, HostWait):
            return (rank, entry.number) in done
        if isinstance(entry, Sync):
            behind = programs[rank][device[rank] : host[rank]]
            return not any(isinstance(e, (Order, Compute)) for e in behind)
        return True

    while True:
        state = (list(host), list(device), len(done), len(met))
        for rank, program in enumerate(programs):
            if host[rank] < len(program) and goes_on(rank, program[host[rank]]):
                host[rank] += 1
            if device[rank] < host[rank] and passes(rank, program[device[rank]]):
                device[rank] += 1
            for post in program[: device[rank]]:
                for other in programs[post.peer][: device[post.peer]] if isinstance(post, Post) else ():
                    if (
                        isinstance(post, Post) and isinstance(other, Post) and other.peer == rank
                        and (post.kind, other.kind) == ("send", "recv") and post.size == other.size
                        and (rank, post.number) not in done and (post.peer, other.number) not in done
                        and first(rank, post) and first(post.peer, other)
                    ):  # fmt: skip
                        done |= {(rank, post.number), (post.peer, other.number)}
        if state == (host, device, len(done), len(met)):
            break
    posts = sum(isinstance(entry, Post) for program in programs for entry in program)
    return host == device == [len(program) for program in programs] and len(done) == posts


@settings(max_examples=150, deadline=None)
@given(programs_of_three())
def test_the_verdict_is_that_of_a_plain_scan(programs: list[list[Entry]]) -> None:
    for rule in RULES:
        assert (check_posts(programs, rule) is None) == _ends(programs, rule, shared=False)
    assert (check_posts(programs, "eager", shared=True) is None) == _ends(programs, "eager", shared=True)
    if check_posts(programs, "one_queue") is None:
        assert check_posts(programs, "eager") is None, "more queues than one hold back less"


# ---- programs from schedules alone


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_receives_in_the_order_of_the_plan_end(name: str, stages: int) -> None:
    schedule = make_schedule(name, stages=stages, microbatches=stages + 3)
    chunks = schedule.chunks
    chain = {(c, c + 1) for c in range(chunks - 1)}
    skips = chain | {(c, c + 2) for c in range(chunks - 2)} | {(0, chunks - 1)}
    for edges, tensors in ((chain, {}), (skips, {("F", 0, chunks - 1): 2, ("B", 1, 0): 3})):
        found = check_channels(schedule, messages_of(schedule, edges), tensors=tensors)
        assert found is None, found and found.describe()


def test_no_number_of_receives_posted_ahead_is_safe_with_one_queue() -> None:
    slack = make_schedule("1f1b", stages=2, microbatches=8, slack=4)
    assert check_channels(slack, messages_of(slack)) is None
    for schedule, ahead in [(slack, 1), (make_schedule("1f1b", stages=4, microbatches=8), 2)]:
        messages = messages_of(schedule)
        assert check_channels(schedule, messages, ahead, rules=("lazy", "eager")) is None
        found = check_channels(schedule, messages, ahead)
        assert found is not None
        assert found.rule == "one_queue"
        blocked = [rank.device for rank in found.ranks if rank.device is not None and "one queue" in rank.device.what]
        assert blocked
        assert all(wait.channel is not None and wait.action is not None for wait in blocked)


def test_due_receives_are_those_of_the_order_of_one_run() -> None:
    schedule = make_schedule("1f1b", stages=2, microbatches=2)
    due = receives_due(messages_of(schedule).program[1])
    assert list(due) == list(schedule.actions[1])
    assert due[Action("F", 1, 0)][0] == forward(0)
    assert [message for found in due.values() for message in found] == [forward(0), forward(1)]


def test_only_the_first_step_tells_forms() -> None:
    schedule = make_schedule("gpipe", stages=2, microbatches=4)
    for forms, expected in ((None, 1), ((0, 0, 1, 1), 2)):
        programs = channel_programs(schedule, messages_of(schedule), forms=forms)
        assert [sum(isinstance(entry, Control) for entry in program) for program in programs] == [expected, expected]
