"""Schedules by name, and what is said when they cannot be made."""

from __future__ import annotations

import pytest

from pipepart.errors import ScheduleError
from pipepart.schedule import SCHEDULES, ChunkCosts, make_schedule, v_placement, validate


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_can_be_made_for_any_numbers(name):
    kind = SCHEDULES[name]
    for p in (1, 2, 3, 5):
        for m in (1, 2, 3, 4, 7, 11):
            schedule = make_schedule(name, stages=p, microbatches=m)
            assert schedule.name == name
            assert schedule.stages == p
            assert schedule.microbatches == m
            assert schedule.chunks == p * (kind.fixed_chunks or kind.usual_chunks)
            assert schedule.splits_backward == kind.splits_backward
            assert schedule.forward_only == (name == "forward")
            validate(schedule)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "1f1bb"}, r"schedule '1f1bb' is not known: did you mean '1f1b'\? known: .*zb_v"),
        ({"name": "gpipe", "stages": 0}, "stages is 0; expected a whole number >= 1"),
        ({"name": "gpipe", "microbatches": 0}, "microbatches is 0; expected a whole number >= 1"),
        ({"name": "gpipe", "microbatches": 2.5}, r"microbatches is 2\.5; expected a whole number"),
        ({"name": "gpipe", "chunks": 0}, "chunks is 0"),
        ({"name": "1f1b", "slack": -1}, "slack is -1"),
        ({"name": "1f1b", "chunks": 2}, "'1f1b' takes chunks=1 per stage, got 2; 'interleaved' takes any number"),
        ({"name": "zb_v", "chunks": 3}, "'zb_v' takes chunks=2 per stage, got 3; leave chunks out"),
        ({"name": "gpipe", "slack": 1}, "takes no slack, got slack=1; schedules that do: 1f1b"),
        ({"name": "gpipe", "placement": (0, 1)}, "places its chunks itself"),
        ({"name": "forward", "placement": (0, 0)}, r"expected every stage 0\.\.1 to hold a chunk"),
        ({"name": "auto"}, "schedule 'auto' is not known"),
    ],
)
def test_impossible_wishes_are_refused_with_what_to_do(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(**{"stages": 2, "microbatches": 2, **arguments})


def test_evaluation_runs_over_the_placement_of_training():
    schedule = make_schedule("forward", stages=3, microbatches=4, placement=v_placement(3))
    assert schedule.placement == (0, 1, 2, 2, 1, 0)
    validate(schedule)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": (1.0,), "backward_input": (1.0, 2.0), "backward_weight": (1.0,)}, "expected 1 entries"),
        ({"forward": (-1.0,), "backward_input": (1.0,), "backward_weight": (1.0,)}, "expected numbers >= 0"),
        ({"forward": (float("nan"),), "backward_input": (1.0,), "backward_weight": (1.0,)}, "expected numbers >= 0"),
    ],
)
def test_costs_are_checked(costs, message):
    with pytest.raises(ScheduleError, match=message):
        ChunkCosts(**costs)
