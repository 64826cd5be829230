"""Schedules that trade time for memory, DualPipeV, and zero bubble by search."""

from __future__ import annotations

import random

import pytest

from pipepart.errors import ScheduleError
from pipepart.schedule import ChunkCosts, make_schedule, peak_activations, simulate, step_time, validate
from pipepart.schedule.searched import search_order
from tools.bench.schedules.peers import torch_schedule


def peaks(name: str, stages: int, microbatches: int) -> tuple[float, ...]:
    """Largest live activations of each stage, in micro-batches of a stage."""
    schedule = make_schedule(name, stages=stages, microbatches=microbatches)
    held = schedule.chunks // stages
    return peak_activations(schedule, (1 / held,) * schedule.chunks)


@pytest.mark.parametrize(
    ("name", "share", "constant"), [("v_half", 1 / 2, 3 / 2), ("v_min", 1 / 3, 4 / 3), ("dualpipe_v", 1, 1 / 2)]
)
def test_peaks_are_a_share_of_those_of_1f1b_and_a_constant(name, share, constant):
    for p in (2, 3, 4, 5, 7, 8, 12, 16, 33):
        m = 2 * p + 5
        most = max(peaks("1f1b", p, m))
        assert most == p
        assert max(peaks(name, p, m)) <= share * most + constant + 1e-9, p
        assert max(peaks(name, p, m + 2 * p)) == max(peaks(name, p, m)), "the peak does not grow with the micro-batches"


@pytest.mark.parametrize("p", [4, 8, 16])
def test_less_memory_costs_less_time_than_1f1b_takes(p):
    m = 3 * p

    def step(name: str) -> float:
        schedule = make_schedule(name, stages=p, microbatches=m)
        return step_time(schedule, ChunkCosts.even(p, schedule.chunks // p))

    assert step("zb_v") < step("v_half") <= step("v_min") < step("1f1b")
    assert max(peaks("v_min", p, m)) < max(peaks("v_half", p, m)) < max(peaks("zb_v", p, m))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_dualpipe_v_is_that_of_torch(p):
    for m in (2 * p, 2 * p + 1, 3 * p, 4 * p):
        mine, other = (
            make_schedule("dualpipe_v", stages=p, microbatches=m),
            torch_schedule("ScheduleDualPipeV", p, m, 2),
        )
        assert (mine.placement, mine.actions) == (other.placement, other.actions), m


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_a_searched_order_is_as_short_as_the_rule_with_its_memory(p):
    costs = ChunkCosts.even(p)
    for m in (1, 2, 3, 7, 2 * p, 3 * p):
        for searched, rule, depth in (("zb_1p", "zb_h1", 1), ("zb_2p", "zb_h2", 2)):
            schedule = make_schedule(searched, stages=p, microbatches=m)
            assert step_time(schedule, costs) <= step_time(make_schedule(rule, stages=p, microbatches=m), costs)
            assert max(peaks(searched, p, m)) <= depth * p


@pytest.mark.parametrize("seed", range(8))
def test_a_searched_order_has_the_times_of_the_simulator_and_fits_them(seed):
    """The search simulates as the simulator does; with uneven times it is shorter than the order for even times."""
    draw = random.Random(seed)
    p, m = draw.randint(2, 6), draw.randint(6, 16)
    links = {(s, s + 1): draw.choice([0.0, draw.uniform(0, 0.5)]) for s in range(p - 1)}
    times = [tuple(draw.uniform(0.5, 2) for _ in range(p)) for _ in range(3)]
    costs = ChunkCosts(*times, send_forward=links, send_backward=links, handling_forward=(0.1,) * p)
    for depth, name in ((1, "zb_1p"), (2, "zb_2p")):
        found = search_order(p, m, costs, depth)
        schedule = make_schedule(name, stages=p, microbatches=m, costs=costs)
        assert schedule.actions == found.orders
        validate(schedule, memory_limit=(float(depth * p),) * p)
        timeline = simulate(schedule, costs)
        assert max(event.end for event in timeline.events) == pytest.approx(found.step)
        assert timeline.period == pytest.approx(found.period)
        assert found.step <= step_time(make_schedule(name, stages=p, microbatches=m), costs) * 1.03
        assert search_order(p, m, costs, depth, overlap=True).period <= found.period


def test_a_search_needs_the_costs_of_one_chunk_per_stage():
    with pytest.raises(ScheduleError, match="expected costs of 2 chunks, one per stage, got 4"):
        make_schedule("zb_1p", stages=2, microbatches=3, costs=ChunkCosts.even(2, 2))
