"""`auto` and what supports it: the lower bound, list scheduling under a memory limit, jitter and slack."""

from __future__ import annotations

import random
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart.errors import ScheduleError
from pipepart.schedule import (
    SCHEDULES,
    Action,
    ChunkCosts,
    Edges,
    Schedule,
    best_schedule,
    looped_placement,
    lower_bound,
    make_schedule,
    peak_activations,
    simulate,
    step_time,
    v_placement,
    validate,
)
from pipepart.schedule.greedy import Policy, list_schedule

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def problems(draw):
    """Stages, micro-batches, random costs and links, and perhaps a memory limit that holds one micro-batch at least."""
    p, m, v = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 2))
    chunks = p * v
    seconds = st.lists(st.floats(0.2, 2.0), min_size=chunks, max_size=chunks)
    pairs = sorted(Edges.chain(chunks).forward)
    if chunks > 2 and draw(st.booleans()):  # any graph, also with chunks that do not wait for each other
        pairs = draw(st.lists(st.tuples(st.integers(0, chunks - 2), st.integers(1, chunks - 1)), max_size=6))
        pairs = sorted({pair for pair in pairs if pair[0] < pair[1]} | {(0, chunks - 1)})
    links = {pair: draw(st.sampled_from([0.0, 0.1, 0.7])) for pair in pairs}
    sizes = tuple(draw(st.lists(st.floats(0.5, 2.0), min_size=chunks, max_size=chunks)))
    costs = ChunkCosts(
        tuple(draw(seconds)),
        tuple(draw(seconds)),
        tuple(draw(seconds)),
        activation=sizes,
        send_forward=links,
        send_backward=links,
        contention=draw(st.booleans()),
    )
    room = draw(st.sampled_from([None, 1.0, 1.5, 3.0]))
    limit = None if room is None else room * sum(sorted(sizes)[-v:])
    return p, m, costs, limit


@SETTINGS
@given(problems(), st.booleans())
def test_auto_is_valid_fits_and_is_never_slower_than_the_best_fixed_schedule(problem, split):
    p, m, costs, limit = problem
    choice = best_schedule(p, m, costs, memory_limit=limit, split=split, effort=20_000)
    schedule = choice.schedule
    limits = None if limit is None else [limit] * p
    validate(schedule, costs.edges.forward, costs.edges.backward, activation=costs.activation, memory_limit=limits)
    assert choice.step_time == pytest.approx(simulate(schedule, costs).step_time)
    assert choice.step_time >= choice.bound * (1 - 1e-9)
    if not split:
        assert not schedule.splits_backward
    for name, kind in SCHEDULES.items():
        v = costs.chunks // p
        if name == "forward" or kind.fixed_chunks not in (None, v) or (kind.splits_backward and not split):
            continue
        for slack in (0, p - 1) if kind.takes_slack else (0,):
            fixed = make_schedule(name, stages=p, microbatches=m, chunks=v, slack=slack)
            if limit is None or max(peak_activations(fixed, costs.activation)) <= limit:
                assert choice.step_time <= step_time(fixed, costs) * (1 + 1e-9), name


@SETTINGS
@given(problems())
def test_no_schedule_is_below_the_lower_bound(problem):
    p, m, costs, _ = problem
    v = costs.chunks // p
    for name, kind in SCHEDULES.items():
        if name == "forward" or kind.fixed_chunks not in (None, v):
            continue
        schedule = make_schedule(name, stages=p, microbatches=m, chunks=v)
        peaks = peak_activations(schedule, costs.activation)
        bound = lower_bound(schedule.placement, m, costs, split=schedule.splits_backward, memory_limit=peaks)
        assert step_time(schedule, costs) >= bound * (1 - 1e-9), name


@SETTINGS
@given(
    problems(),
    st.builds(Policy, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0])),
    st.booleans(),
)
def test_list_schedules_are_valid_and_keep_to_the_limit(problem, policy, bent):
    p, m, costs, limit = problem
    placement = (v_placement if bent else looped_placement)(p, costs.chunks // p)
    limits = None if limit is None else [limit] * p
    schedule = list_schedule(placement, m, costs, limits=limits, policy=policy)
    validate(schedule, costs.edges.forward, costs.edges.backward, activation=costs.activation, memory_limit=limits)


def every_order(m):
    """All orders of one stage's F and B of m micro-batches in which each F comes before its B."""
    actions = [(kind, k) for kind in "FB" for k in range(m)]
    for order in permutations(actions):
        if all(order.index(("F", k)) < order.index(("B", k)) for k in range(m)):
            yield order


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_and_auto_against_all_schedules_there_are(seed):
    """Two stages, two micro-batches, every possible order: the best of them is what `auto` finds."""
    draw = random.Random(seed)
    times = [tuple(draw.uniform(0.5, 2) for _ in range(2)) for _ in range(3)]
    link = {(0, 1): draw.uniform(0, 1)}
    costs = ChunkCosts(*times, send_forward=link, send_backward=link)
    best = float("inf")
    for orders in product(every_order(2), repeat=2):
        lists = tuple(tuple(Action(kind, stage, k) for kind, k in order) for stage, order in enumerate(orders))
        try:
            best = min(best, step_time(Schedule("any", 2, 2, (0, 1), lists), costs))
        except ScheduleError:
            continue
    choice = best_schedule(2, 2, costs, split=False)
    assert choice.bound <= best * (1 + 1e-9)
    assert choice.step_time == pytest.approx(best)


def test_auto_uses_unequal_chunks_better_than_any_fixed_schedule():
    forward = (1.0, 0.6, 1.4, 0.8)
    costs = ChunkCosts(forward, tuple(1.3 * f for f in forward), tuple(0.7 * f for f in forward))
    choice = best_schedule(4, 8, costs, memory_limit=6.0)
    assert choice.step_time < min(time for _, time in choice.fixed)
    assert choice.gap < 0.02


def test_auto_works_with_less_memory_than_any_fixed_schedule_needs():
    costs = ChunkCosts.even(4)
    choice = best_schedule(4, 8, costs, memory_limit=2.0, split=False)
    assert choice.fixed == ()
    # two micro-batches at a time, each 12 there and back through four stages: no less than four times 12
    assert choice.bound == 48
    assert choice.gap < 0.07
    choice = best_schedule(4, 8, costs, memory_limit=2.0)
    assert choice.fixed == ()
    assert choice.gap < 0.15
    assert max(peak_activations(choice.schedule)) <= 2
    with pytest.raises(ScheduleError, match=r"stage 0: one micro-batch keeps 1 of activations, the limit is 0\.5"):
        best_schedule(4, 8, costs, memory_limit=0.5)


def test_auto_gives_the_same_answer_every_time():
    costs = ChunkCosts((1.0, 0.7, 1.2), (1.0, 0.9, 1.4), (0.4, 0.5, 0.9), send_forward={(0, 1): 0.3, (1, 2): 0.1})
    first, second = (best_schedule(3, 6, costs, memory_limit=3.0) for _ in range(2))
    assert first.schedule.actions == second.schedule.actions


def test_auto_keeps_a_given_placement_and_refuses_what_does_not_fit_together():
    costs = ChunkCosts.even(2, 2)
    bent = best_schedule(2, 4, costs, placement=(0, 1, 1, 0))
    assert bent.schedule.placement == (0, 1, 1, 0)
    assert make_schedule("auto", stages=2, microbatches=4, costs=costs).chunks == 4
    with pytest.raises(ScheduleError, match="4 chunks cannot be spread evenly over 3 stages"):
        best_schedule(3, 4, costs)
    with pytest.raises(ScheduleError, match="memory_limit has 3 entries, expected one per stage"):
        best_schedule(2, 4, costs, memory_limit=[1, 2, 3])
    with pytest.raises(ScheduleError, match="3 chunks on 2 stages, but costs for 4 chunks"):
        make_schedule("auto", stages=2, microbatches=4, chunks=3, costs=costs)


def mean_step(slack, jitter, p, m, draws=20):
    schedule = make_schedule("1f1b", stages=p, microbatches=m, slack=slack)
    total = 0.0
    for seed in range(draws):
        draw = random.Random(seed)
        factor = {(k, c, n): 1 + jitter * draw.uniform(-1, 1) for k in "FB" for c in range(p) for n in range(m)}
        timeline = simulate(
            schedule, ChunkCosts.even(p), scale=lambda a, factor=factor: factor[a.kind, a.chunk, a.microbatch]
        )
        total += timeline.step_time
    return total / draws


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (6, 18)])
def test_slack_absorbs_jitter(p, m):
    """Without slack every delay stops the neighbours; with one micro-batch of stock per cut most of it is hidden."""
    calm = mean_step(0, 0.0, p, m, 1)
    assert mean_step(p - 1, 0.0, p, m, 1) == calm
    growth, with_slack = mean_step(0, 0.5, p, m) - calm, mean_step(p - 1, 0.5, p, m) - calm
    assert growth > 0
    assert with_slack < 0.5 * growth


def test_slack_hides_the_time_of_links():
    costs = ChunkCosts.even(4, send=0.2)
    times = [step_time(make_schedule("1f1b", stages=4, microbatches=16, slack=n), costs) for n in range(4)]
    assert times == sorted(times, reverse=True)
    assert times[3] < 0.94 * times[0]


def test_slack_costs_that_many_activations_at_most():
    for slack in range(6):
        peaks = peak_activations(make_schedule("1f1b", stages=4, microbatches=32, slack=slack))
        assert peaks[0] == 4 + slack
        assert peaks[3] == 1
        assert all(peak <= 4 - i + slack for i, peak in enumerate(peaks))
