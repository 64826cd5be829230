"""The validator: correct schedules pass, broken ones are named, and it agrees with a plain execution of the lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart.errors import ScheduleError
from pipepart.schedule import (
    SCHEDULES,
    Action,
    Edges,
    Schedule,
    make_schedule,
    messages_of,
    peak_activations,
    validate,
    validate_program,
)
from pipepart.schedule.dependencies import ActionGraph
from pipepart.schedule.messages import all_meet, check_blocking, check_ordered, meetings

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = sorted(SCHEDULES)


def changed(schedule, stage, actions):
    lists = list(schedule.actions)
    lists[stage] = tuple(actions)
    return replace(schedule, actions=tuple(lists))


@st.composite
def schedules(draw, most_stages=5, most_microbatches=6):
    name = draw(st.sampled_from(NAMES))
    kind = SCHEDULES[name]
    return make_schedule(
        name,
        stages=draw(st.integers(1, most_stages)),
        microbatches=draw(st.integers(1, most_microbatches)),
        chunks=kind.fixed_chunks or draw(st.integers(1, 3)),
        slack=draw(st.integers(0, 4)) if kind.takes_slack else 0,
    )


@st.composite
def edges_for(draw, chunks):
    """The chain and some skips, some of them without a gradient, and perhaps a tie."""
    pairs = [(a, b) for a in range(chunks) for b in range(a + 2, chunks)]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    forward = Edges.chain(chunks).forward | set(skips)
    mute = draw(st.sets(st.sampled_from(sorted(forward)), max_size=2)) if forward else set()
    return forward, forward - mute


@SETTINGS
@given(schedules(), st.data())
def test_every_generated_schedule_is_proved_also_with_skips(schedule, data):
    forward, backward = data.draw(edges_for(schedule.chunks))
    proof = validate(schedule, forward, backward, tied=[(0, schedule.chunks - 1)])
    assert proof.peak_activations == peak_activations(schedule)
    for (low, high), messages in proof.pair_order.items():
        for sender, receiver in ((low, high), (high, low)):
            one_way = tuple(m for m in messages if schedule.placement[m.source] == sender)
            assert one_way == proof.channels.get((sender, receiver), ())
    assert sum(map(len, proof.channels.values())) == sum(map(len, proof.pair_order.values()))
    first, last = schedule.placement[0], schedule.placement[-1]
    assert proof.tied_order == (((min(first, last), max(first, last)),) if first != last else ())


def carried_out(schedule):
    """Whether the lists can be worked off, by trying: an independent, slow check."""
    done, cursor, moved = set(), [0] * schedule.stages, True
    last = schedule.chunks - 1
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.actions):
            while cursor[stage] < len(actions):
                a = actions[cursor[stage]]
                c, k = a.chunk, a.microbatch
                back = {("B", c + 1, k), ("I", c + 1, k)}
                ready = {
                    "F": c == 0 or ("F", c - 1, k) in done,
                    "B": ("F", c, k) in done and (c == last or bool(back & done)),
                    "I": ("F", c, k) in done and (c == last or bool(back & done)),
                    "W": ("I", c, k) in done,
                }[a.kind]
                if not ready:
                    break
                done.add((a.kind, c, k))
                cursor[stage] += 1
                moved = True
    return all(cursor[s] == len(actions) for s, actions in enumerate(schedule.actions))


@settings(SETTINGS, max_examples=150)
@given(schedules(4, 4), st.data())
def test_the_validator_agrees_with_carrying_out_a_shuffled_schedule(schedule, data):
    for _ in range(data.draw(st.integers(1, 3))):
        stage = data.draw(st.integers(0, schedule.stages - 1))
        line = list(schedule.actions[stage])
        a, b = data.draw(st.integers(0, len(line) - 1)), data.draw(st.integers(0, len(line) - 1))
        line[a], line[b] = line[b], line[a]
        schedule = changed(schedule, stage, line)
    if carried_out(schedule):
        validate(schedule)
    else:
        with pytest.raises(ScheduleError):
            validate(schedule)


@settings(SETTINGS, max_examples=100)
@given(schedules(4, 4), st.data())
def test_a_missing_or_doubled_action_is_always_found(schedule, data):
    stage = data.draw(st.integers(0, schedule.stages - 1))
    line = list(schedule.actions[stage])
    at = data.draw(st.integers(0, len(line) - 1))
    victim = line[at]
    fewer = changed(schedule, stage, line[:at] + line[at + 1 :])
    # without its only forward or backward action a schedule may become forward-only, or lose a micro-batch entirely
    if not fewer.forward_only or schedule.forward_only:
        with pytest.raises(ScheduleError, match=rf"{victim} is missing on stage {stage}|needs {victim}"):
            validate(fewer)
    with pytest.raises(ScheduleError, match=f"stage {stage} does {victim} twice"):
        validate(changed(schedule, stage, [*line, victim]))


def test_a_broken_dependency_on_one_stage_names_both_actions():
    schedule = make_schedule("1f1b", stages=2, microbatches=3)
    line = list(schedule.actions[1])
    line[0], line[1] = line[1], line[0]
    with pytest.raises(ScheduleError, match=r"stage 1 does B1\.0 \(action 0\) before F1\.0 \(action 1\)"):
        validate(changed(schedule, 1, line))


def test_stages_that_wait_in_a_circle_are_named_with_their_actions():
    one = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    two = [Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)]
    with pytest.raises(ScheduleError) as error:
        validate(Schedule("circle", 2, 2, (0, 1), (tuple(one), tuple(two))))
    assert "stage 0: B0.0 waits for B1.0 (stage 1)" in str(error.value)
    assert "stage 1: F1.1 waits for F0.1 (stage 0)" in str(error.value)


def test_a_skip_can_break_an_order_that_the_chain_allows():
    """Chunk 1 needs nothing from chunk 0 here; with the edge it does."""
    lists = ((Action("F", 0, 0), Action("F", 0, 1)), (Action("F", 1, 1), Action("F", 1, 0)))
    schedule = Schedule("free", 2, 2, (0, 1), lists)
    validate(schedule, forward_edges=())
    back = Schedule("crossed", 2, 2, (0, 1, 0), (
        (Action("F", 0, 0), Action("F", 2, 0), Action("F", 0, 1), Action("F", 2, 1)),
        (Action("F", 1, 1), Action("F", 1, 0)),
    ))  # fmt: skip
    validate(back, forward_edges=[(0, 2)])
    with pytest.raises(ScheduleError, match=r"F2\.0 waits for F1\.0"):
        validate(back, forward_edges=[(0, 1), (1, 2)])


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (((Action("F", 0, 0),), (Action("F", 0, 0),)), "stage 1 has F0.0, but chunk 0 is on stage 0"),
        (((Action("F", 0, 7),), (Action("F", 1, 0),)), "micro-batches 0..0"),
        (((Action("F", 3, 0),), (Action("F", 1, 0),)), "chunks 0..1"),
        (((Action("SEND", 0, 0, 1, "F"),), (Action("F", 1, 0),)), "stage 0 has SEND F 0>1"),
        (((Action("F", 0, 0),),), "2 stages, but lists of actions for 1"),
        (((Action("F", 0, 0),), ()), "F1.0 is missing on stage 1"),
        (((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 0),)), "B1.0 is missing on stage 1"),
        (
            ((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 0), Action("I", 1, 0))),
            "W1.0 is missing on stage 1",
        ),
        (
            ((Action("F", 0, 0), Action("B", 0, 0), Action("W", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))),
            "stage 0 does both B0.0 and W0.0",
        ),
    ],
)
def test_lists_that_are_no_schedule_are_refused_by_name(lists, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule("odd", 2, 1, (0, 1), lists))


def test_full_and_split_backwards_may_be_mixed():
    lists = (
        (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("I", 0, 1), Action("W", 0, 1)),
        (Action("F", 1, 0), Action("I", 1, 0), Action("F", 1, 1), Action("W", 1, 0), Action("B", 1, 1)),
    )
    assert validate(Schedule("mixed", 2, 2, (0, 1), lists)).peak_activations == (2, 2)


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ([(1, 0)], None, "edge 1>0"),
        ([(0, 9)], None, "edge 0>9"),
        ([(0, 1)], [(1, 2)], "gradient edges 1>2: no activation goes that way"),
    ],
)
def test_edges_are_checked(forward, backward, message):
    with pytest.raises(ScheduleError, match=message):
        validate(make_schedule("1f1b", stages=3, microbatches=1), forward, backward)


def test_a_memory_limit_is_held_against_the_peak():
    schedule = make_schedule("gpipe", stages=2, microbatches=6)
    validate(schedule, memory_limit=(6, 6))
    with pytest.raises(ScheduleError, match="stage 1 keeps 12 of activations at its peak, the limit is 10"):
        validate(schedule, activation=(1, 2), memory_limit=(6, 10))


@pytest.mark.parametrize("name", NAMES)
def test_a_message_that_is_not_sent_or_not_received_is_named(name):
    schedule = make_schedule(name, stages=3, microbatches=2)
    lists = messages_of(schedule).program
    validate_program(lists)
    for stage, actions in enumerate(lists):
        for at, action in enumerate(actions):
            if action.kind in ("SEND", "RECV"):
                less = [list(mine) for mine in lists]
                del less[stage][at]
                with pytest.raises(ScheduleError, match=f"message missing: stage {stage} never does {action}"):
                    validate_program(less)


def test_a_message_nobody_asks_for_is_named():
    lists = [list(mine) for mine in messages_of(make_schedule("gpipe", stages=3, microbatches=1)).program]
    lists[0].append(Action("SEND", 0, 0, 2, "F"))
    with pytest.raises(ScheduleError, match=r"stage 0 does SEND F 0>2 \.0, but no edge asks for this message"):
        validate_program(lists)


def test_using_before_receiving_and_sending_before_making_are_named():
    lists = [list(mine) for mine in messages_of(make_schedule("forward", stages=2, microbatches=1)).program]
    assert [str(a) for a in lists[1]] == ["RECV F 0>1 .0", "F1.0"]
    with pytest.raises(ScheduleError, match=r"stage 1 does F1\.0 before RECV F 0>1 \.0"):
        validate_program([lists[0], lists[1][::-1]])
    with pytest.raises(ScheduleError, match=r"stage 0 does SEND F 0>1 \.0 before F0\.0 has made it"):
        validate_program([lists[0][::-1], lists[1]])


def test_blocking_sends_that_cross_are_a_deadlock_and_asynchronous_ones_a_wrong_order():
    """Both stages send before they receive: the classic hang of 1F1B with blocking sends."""
    f, b = (Action("SEND", 0, 1, 1, "F"), Action("RECV", 1, 1, 0, "F")), (
        Action("SEND", 1, 0, 0, "B"), Action("RECV", 0, 0, 1, "B"))  # fmt: skip
    first = [Action("F", 0, 0), Action("SEND", 0, 0, 1, "F"), Action("F", 0, 1), f[0], b[1], Action("B", 0, 0)]
    second = [Action("RECV", 1, 0, 0, "F"), Action("F", 1, 0), Action("B", 1, 0), b[0], f[1], Action("F", 1, 1)]
    with pytest.raises(ScheduleError) as error:
        check_blocking("crossed", [first, second], (0, 1))
    assert "deadlock with blocking sends" in str(error.value)
    assert "stage 0: SEND F 0>1 .1 waits for RECV F 0>1 .1 on stage 1" in str(error.value)
    assert "stage 1: SEND B 1>0 .0 waits for RECV B 1>0 .0 on stage 0" in str(error.value)
    with pytest.raises(ScheduleError, match="stages 0 and 1 do not agree on the order"):
        check_ordered("crossed", [first, second], (0, 1))


def test_stages_that_wait_for_each_other_over_ordered_channels_are_named():
    """Every pair agrees on its order, but 0 waits for 1, 1 for 2 and 2 for 0."""
    lists = [
        [Action("RECV", 0, 0, 1, "B"), Action("B", 0, 0), Action("SEND", 0, 0, 1, "F")],
        [Action("RECV", 1, 0, 2, "B"), Action("B", 1, 0), Action("SEND", 1, 0, 0, "B"), Action("RECV", 1, 0, 0, "F")],
        [Action("RECV", 2, 0, 0, "F"), Action("F", 2, 0), Action("SEND", 2, 0, 1, "B")],
    ]
    lists[0].append(Action("SEND", 0, 0, 2, "F"))
    with pytest.raises(ScheduleError) as error:
        check_ordered("circle", lists, (0, 1, 2))
    assert "deadlock with ordered channels" in str(error.value)
    assert "stage 0: B0.0 waits for RECV B 1>0 .0 from stage 1" in str(error.value)
    assert "stage 2: F2.0 waits for RECV F 0>2 .0 from stage 0" in str(error.value)


@SETTINGS
@given(schedules(4, 5), st.data())
def test_what_blocking_sends_carry_out_ordered_channels_do_too(schedule, data):
    forward, backward = data.draw(edges_for(schedule.chunks))
    lists = messages_of(schedule, forward, backward).program
    check_blocking("own", lists, schedule.placement)
    check_ordered("own", lists, schedule.placement)
    assert validate_program(lists, forward, backward).program == validate(schedule, forward, backward).program == lists


@SETTINGS
@given(schedules(4, 5), st.data())
def test_the_short_form_of_the_blocking_check_says_the_same(schedule, data):
    forward, backward = data.draw(edges_for(schedule.chunks))
    edges = Edges.of(schedule.chunks, forward, () if schedule.forward_only else backward)
    lists = meetings(ActionGraph.of(schedule, edges))
    assert all_meet(lists)
    longest = max(lists, key=len)
    if len(longest) > 1:
        a, b = data.draw(st.integers(0, len(longest) - 1)), data.draw(st.integers(0, len(longest) - 1))
        longest[a], longest[b] = longest[b], longest[a]
        order = {n: [n if n >= 0 else ~n for n in mine] for n, mine in enumerate(lists)}
        assert all_meet(lists) == met_by_trying(order)
        longest.pop()
        assert not all_meet(lists)


def met_by_trying(order):
    """Take away any message that stands first on both its stages until nothing moves."""
    left = {stage: list(mine) for stage, mine in order.items()}
    while True:
        heads = [mine[0] for mine in left.values() if mine]
        met = next((n for n in heads if heads.count(n) == 2), None)
        if met is None:
            return not heads
        for mine in left.values():
            if mine and mine[0] == met:
                mine.pop(0)
