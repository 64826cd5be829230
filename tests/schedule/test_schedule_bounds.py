"""The lower bound of the step, jitter and slack."""

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
    lower_bound,
    make_schedule,
    peak_activations,
    simulate,
    step_time,
)

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def problems(draw):
    """Stages, micro-batches, random costs and links."""
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
    return p, m, costs


@SETTINGS
@given(problems())
def test_no_schedule_is_below_the_lower_bound(problem):
    p, m, costs = problem
    v = costs.chunks // p
    for name, kind in SCHEDULES.items():
        if name == "forward" or kind.fixed_chunks not in (None, v):
            continue
        schedule = make_schedule(name, stages=p, microbatches=m, chunks=v)
        bound = lower_bound(schedule.placement, m, costs, split=schedule.splits_backward)
        assert step_time(schedule, costs) >= bound * (1 - 1e-9), name


def every_order(m):
    """All orders of one stage's F and B of m micro-batches in which each F comes before its B."""
    actions = [(kind, k) for kind in "FB" for k in range(m)]
    for order in permutations(actions):
        if all(order.index(("F", k)) < order.index(("B", k)) for k in range(m)):
            yield order


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_against_all_schedules_there_are(seed):
    """Two stages, two micro-batches, every possible order: none is below the bound."""
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
    bound = lower_bound((0, 1), 2, costs, split=False)
    assert 0 < bound <= best * (1 + 1e-9)


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
