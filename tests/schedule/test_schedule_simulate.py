"""The simulator against times worked out by hand and against a naive longest path."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart.errors import ScheduleError
from pipepart.schedule import (
    SCHEDULES,
    Action,
    ChunkCosts,
    Edges,
    Event,
    Schedule,
    Timeline,
    make_schedule,
    simulate,
    step_time,
)

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


def at(timeline, text):
    """(start, end) of the only event with this short form."""
    (event,) = [event for event in timeline.events if str(event.action) == text]
    return event.start, event.end


def costs_of(chunks, **more):
    return ChunkCosts((1.0,) * chunks, (2.0,) * chunks, (3.0,) * chunks, **more)


def test_handling_keeps_the_device_before_the_action_by_hand():
    costs = costs_of(2, handling_forward=(0.5, 0.25), handling_backward=(0.125, 0.75))
    timeline = simulate(make_schedule("1f1b", stages=2, microbatches=1), costs)
    assert at(timeline, "F0.0") == (0.5, 1.5)
    assert at(timeline, "F1.0") == (1.75, 2.75)
    assert at(timeline, "B1.0") == (3.5, 8.5)
    assert at(timeline, "B0.0") == (8.625, 13.625)
    assert timeline.busy == (6, 6)  # compute alone
    assert step_time(make_schedule("1f1b", stages=2, microbatches=1), costs) == timeline.step_time == 13.125


def test_ties_are_summed_when_all_their_stages_have_done_all_else_by_hand():
    costs = costs_of(4, reduce_tied=(0.5,))
    schedule = make_schedule("interleaved", stages=2, microbatches=2, chunks=2)
    plain = simulate(schedule, costs_of(4)).step_time
    timeline = simulate(schedule, costs, Edges.of(4, [(0, 1), (1, 2), (2, 3)], tied=[(0, 3)]))
    reductions = [event for event in timeline.events if event.action.kind == "REDUCE"]
    assert [(event.stage, event.start, event.end) for event in reductions] == [
        (0, plain, plain + 0.5),
        (1, plain, plain + 0.5),
    ]


def test_one_microbatch_over_a_link_by_hand():
    costs = costs_of(2, send_forward={(0, 1): 0.5}, send_backward={(0, 1): 0.25})
    timeline = simulate(make_schedule("1f1b", stages=2, microbatches=1), costs)
    assert at(timeline, "F0.0") == (0, 1)
    assert at(timeline, "SEND F 0>1 .0") == (1, 1.5)
    assert at(timeline, "F1.0") == (1.5, 2.5)
    assert at(timeline, "B1.0") == (2.5, 7.5)
    assert at(timeline, "SEND B 1>0 .0") == (7.5, 7.75)
    assert at(timeline, "B0.0") == (7.75, 12.75)
    assert timeline.step_time == 12.75
    assert timeline.busy == (6, 6)
    assert timeline.idle == (6.75, 6.75)
    assert timeline.bubble == pytest.approx(6.75 / 12.75)
    assert [str(event.action) for event in timeline.critical_path] == [
        "F0.0", "SEND F 0>1 .0", "F1.0", "B1.0", "SEND B 1>0 .0", "B0.0",
    ]  # fmt: skip


def test_gradients_leave_after_the_input_half():
    schedule = Schedule(
        "two", 2, 1, (0, 1), ((Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)),
                              (Action("F", 1, 0), Action("I", 1, 0), Action("W", 1, 0)))
    )  # fmt: skip
    timeline = simulate(schedule, costs_of(2))
    assert at(timeline, "I0.0") == (4, 6)
    assert at(timeline, "W1.0") == (4, 7)
    assert timeline.step_time == 9


def test_recompute_is_part_of_the_backward_and_a_full_backward_can_have_its_own_time():
    schedule = make_schedule("gpipe", stages=1, microbatches=1)
    assert simulate(schedule, costs_of(1, recompute=(0.5,))).step_time == 6.5
    assert simulate(schedule, costs_of(1, backward=(4.0,))).step_time == 5.0


def test_messages_share_the_links_of_a_device_one_at_a_time():
    edges = Edges.of(3, [(0, 1), (0, 2), (1, 2)], [])
    schedule = make_schedule("forward", stages=3, microbatches=2)
    links = {(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.0}
    free = simulate(schedule, costs_of(3, send_forward=links), edges)
    assert at(free, "SEND F 0>1 .0") == (1, 2)
    assert at(free, "SEND F 0>2 .0") == (1, 2)
    busy = simulate(schedule, costs_of(3, send_forward=links, contention=True), edges)
    assert at(busy, "SEND F 0>1 .0") == (1, 2)
    assert at(busy, "SEND F 0>2 .0") == (2, 3)  # behind the other on the way out
    assert at(busy, "SEND F 1>2 .0") == (3, 4)  # chunk 1 is done at 3; the way in is free again at 3
    assert at(busy, "SEND F 0>1 .1") == (3, 4)
    assert at(busy, "F2.0") == (4, 5)
    assert busy.step_time > free.step_time


def test_edges_inside_a_stage_are_free():
    costs = ChunkCosts.even(1, 2, send=5.0)
    assert simulate(make_schedule("interleaved", stages=1, microbatches=3), costs).step_time == 9


def test_replica_reduction_starts_when_gradients_are_final_and_hides_behind_other_chunks():
    schedule = make_schedule("interleaved", stages=1, microbatches=2, chunks=2)
    base = simulate(schedule, costs_of(2)).step_time
    timeline = simulate(schedule, costs_of(2, reduce=(1.0, 4.0)))
    last_of_chunk_1 = at(timeline, "B1.1")[1]
    assert at(timeline, "REDUCE 1") == (last_of_chunk_1, last_of_chunk_1 + 4)
    assert at(timeline, "REDUCE 0") == (base, base + 1)
    assert timeline.step_time == base + 1
    assert step_time(schedule, costs_of(2, reduce=(1.0, 4.0))) == base + 1
    assert timeline.critical_path[-1].action.kind == "REDUCE"


def test_tied_gradients_are_summed_when_the_last_of_them_is_final():
    schedule = make_schedule("1f1b", stages=3, microbatches=2)
    edges = Edges.of(3, tied=[(0, 2)])
    plain = simulate(schedule, costs_of(3), edges)
    timeline = simulate(schedule, costs_of(3, reduce_tied=(0.5,)), edges)
    reduces = [event for event in timeline.events if event.action.kind == "REDUCE"]
    assert [(event.stage, event.start) for event in reduces] == [(0, plain.step_time), (2, plain.step_time)]
    assert timeline.step_time == plain.step_time + 0.5
    together = Edges.of(3, tied=[(1, 1)])
    assert simulate(schedule, costs_of(3, reduce_tied=(0.5,)), together).step_time == plain.step_time


def test_the_memory_curve_rises_with_forwards_and_falls_with_backwards():
    timeline = simulate(make_schedule("1f1b", stages=2, microbatches=3), ChunkCosts.even(2, activation=10.0))
    assert timeline.peak_activations == (20, 10)
    times, levels = zip(*timeline.memory[1])
    assert list(times) == sorted(times)
    assert levels == (0, 10, 0, 10, 0, 10, 0) or max(levels) == 10
    assert levels[-1] == 0
    assert timeline.memory[0][-1][1] == 0


def test_what_stays_between_the_halves_of_a_backward():
    schedule = make_schedule("zb_h1", stages=4, microbatches=8)
    all_kept = simulate(schedule, ChunkCosts.even(4))
    none_kept = simulate(schedule, ChunkCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, kept_for_weight=0.0))
    assert all_kept.peak_activations == (4, 4, 4, 4)
    assert none_kept.peak_activations == (4, 3, 2, 1)


def test_measured_events_make_the_same_kind_of_timeline():
    predicted = simulate(make_schedule("1f1b", stages=3, microbatches=4), ChunkCosts.even(3, send=0.2))
    shifted = [Event(e.stage, e.action, e.start + 1000, e.end + 1000) for e in reversed(predicted.events)]
    measured = Timeline.from_events(3, shifted, edges=Edges.chain(3))
    assert measured.step_time == pytest.approx(predicted.step_time)
    assert measured.busy == pytest.approx(predicted.busy)
    assert measured.bubble == pytest.approx(predicted.bubble)
    assert measured.peak_activations == predicted.peak_activations
    assert len(measured.critical_path) > 3
    empty = Timeline.from_events(2, [])
    assert (empty.step_time, empty.bubble, empty.critical_path) == (0, 0, ())


def test_an_impossible_order_is_refused_with_the_stages_and_actions():
    wrong = Schedule(
        "wrong", 2, 1, (0, 1), ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    )
    with pytest.raises(ScheduleError) as error:
        simulate(wrong, costs_of(2))
    assert "stage 0: B0.0 waits for F0.0" in str(error.value)
    assert "stage 1: F1.0 waits for F0.0 (stage 0)" in str(error.value)
    with pytest.raises(ScheduleError, match="the schedule has 2 chunks, the costs have 3"):
        simulate(wrong, costs_of(3))


@st.composite
def cases(draw):
    """A named schedule with random costs per chunk and random links."""
    name = draw(st.sampled_from([name for name in SCHEDULES if name != "forward"]))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    kind = SCHEDULES[name]
    v = kind.fixed_chunks or draw(st.integers(1, 3))
    chunks = p * v
    times = st.lists(st.floats(0.1, 3.0), min_size=chunks, max_size=chunks)
    pairs = sorted(Edges.chain(chunks).forward)
    if chunks > 2 and draw(st.booleans()):
        pairs.append((0, chunks - 1))
    links = {pair: draw(st.floats(0.0, 1.0)) for pair in pairs}
    costs = ChunkCosts(
        tuple(draw(times)), tuple(draw(times)), tuple(draw(times)), send_forward=links, send_backward=links
    )
    return make_schedule(name, stages=p, microbatches=m, chunks=v), costs


def naive_times(schedule, costs):
    """End of every action by plain repetition: run whatever stands first on a stage and has all it needs."""
    table = costs.durations()
    edges = costs.edges
    end: dict = {}
    cursor, free = [0] * schedule.stages, [0.0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule.actions):
            while cursor[stage] < len(actions):
                action = actions[cursor[stage]]
                c, k = action.chunk, action.microbatch

                def link(table, a, b, pair):
                    same = schedule.placement[a] == schedule.placement[b]
                    return 0.0 if same else table.get(pair, 0.0)

                if action.kind == "F":
                    needs = [("F", a, k, link(costs.send_forward, a, c, (a, c))) for a, b in edges.forward if b == c]
                elif action.kind == "W":
                    needs = [("I", c, k, 0.0)]
                else:
                    needs = [("F", c, k, 0.0)]
                    needs += [  # the chunk that sends the gradient may do a B where this one does an I
                        ("I" if ("I", b, k) in end else "B", b, k, link(costs.send_backward, b, c, (c, b)))
                        for a, b in edges.backward
                        if a == c
                    ]
                if any(need[:3] not in end for need in needs):
                    break
                start = max([free[stage]] + [end[need[:3]] + need[3] for need in needs])
                free[stage] = end[action.kind, c, k] = start + table[action.kind][c]
                cursor[stage] += 1
                moved = True
    return end


@SETTINGS
@given(cases())
def test_times_are_those_of_a_naive_simulation(case):
    schedule, costs = case
    timeline = simulate(schedule, costs)
    expected = naive_times(schedule, costs)
    found = {(e.action.kind, e.action.chunk, e.action.microbatch): e.end for mine in timeline.compute for e in mine}
    assert found.keys() == expected.keys()
    for key, end in expected.items():
        assert found[key] == pytest.approx(end)
    assert step_time(schedule, costs) == pytest.approx(timeline.step_time)


@SETTINGS
@given(cases(), st.booleans())
def test_the_critical_path_explains_the_whole_step(case, contention):
    schedule, costs = case
    costs = ChunkCosts(
        costs.forward, costs.backward_input, costs.backward_weight,
        send_forward=costs.send_forward, send_backward=costs.send_backward, contention=contention,
    )  # fmt: skip
    timeline = simulate(schedule, costs)
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.step_time
    for before, after in pairwise(path):
        assert after.start == pytest.approx(before.end)


@SETTINGS
@given(cases())
def test_contention_never_makes_a_message_arrive_earlier_than_alone(case):
    schedule, costs = case
    shared = ChunkCosts(
        costs.forward, costs.backward_input, costs.backward_weight,
        send_forward=costs.send_forward, send_backward=costs.send_backward, contention=True,
    )  # fmt: skip
    alone, together = simulate(schedule, costs), simulate(schedule, shared)
    assert together.step_time >= alone.step_time - 1e-9
    sends = [e for e in together.events if e.action.kind == "SEND"]
    for stage in range(schedule.stages):
        mine = sorted((e for e in sends if e.stage == stage), key=lambda e: e.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))
