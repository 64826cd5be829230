"""The account of a step: its parts add up, and each cause of waiting is found where it was put."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from report_samples import jittered, sample_plan

from pipepart.errors import PlanError
from pipepart.planning import Plan, StageMemory
from pipepart.report import plan_text
from pipepart.report.account import MEANINGS, Account, MeanStep, account_of, load_account, save_account
from pipepart.schedule import COMPUTE, Event, Timeline, simulate

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)]


def even(schedule: str = "1f1b", chunks: int = 1, microbatches: int = 8) -> Plan:
    """A plan whose chunks take equally long, and whose messages take no time."""
    plan = sample_plan(4, chunks, microbatches, schedule)
    pieces = tuple(dataclasses.replace(c, forward=1e-3, backward_input=1e-3, backward_weight=1e-3) for c in plan.chunks)
    free = tuple(dataclasses.replace(t, forward_seconds=0.0, backward_seconds=0.0) for t in plan.traffic)
    return dataclasses.replace(plan, chunks=pieces, traffic=free)


def accounted(plan: Plan, timeline: Timeline, **changed: float) -> Account:
    """The account of a timeline in which stages wait wherever they do not compute."""
    length = timeline.step_time
    timeline = Timeline.from_events(timeline.stages, [*timeline.events, *_waits(timeline)])
    mean = MeanStep(20, length + 0.01, length, 0.004, 0.002)
    found = account_of(plan, timeline, dataclasses.replace(mean, **changed))
    assert found is not None
    return found


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_the_parts_add_up_to_the_step(schedule, chunks):
    plan = sample_plan(3, chunks, 6, schedule)
    measured = jittered(plan)
    found = accounted(plan, measured)
    assert [part.name for part in found.parts] == list(MEANINGS)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step)
    assert found.step == pytest.approx(measured.step_time + 0.01)
    assert found.seconds("compute") == pytest.approx(sum(measured.busy) / 3)
    assert found.seconds("trainer") == pytest.approx(0.004)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_an_even_step_without_messages_has_only_the_bubble_of_its_schedule(schedule, chunks):
    plan = even(schedule, chunks)
    timeline = plan.timeline
    found = accounted(plan, timeline)
    assert found.seconds("bubble") == pytest.approx(timeline.step_time - sum(timeline.busy) / 4)
    for name in ("imbalance", "communication", "overhead"):
        assert found.seconds(name) == pytest.approx(0.0, abs=1e-9)


def test_one_slow_stage_is_imbalance():
    plan = even()
    slow = simulate(plan.make_schedule(), plan.costs, plan.edges, scale=lambda a: 2.0 if a.chunk == 1 else 1.0)
    found, before = accounted(plan, slow), accounted(plan, plan.timeline)
    mean = sum(slow.busy) / 4
    assert found.seconds("bubble") == pytest.approx(before.seconds("bubble") * mean / (sum(plan.timeline.busy) / 4))
    assert found.seconds("imbalance") == pytest.approx(slow.step_time - mean - found.seconds("bubble"))
    assert found.seconds("imbalance") > 5 * found.seconds("communication")


def test_slow_links_are_communication():
    plan = even()
    traffic = tuple(dataclasses.replace(t, forward_seconds=3e-3, backward_seconds=3e-3) for t in plan.traffic)
    slow = dataclasses.replace(plan, traffic=traffic).timeline
    found = accounted(plan, slow)
    assert found.seconds("communication") == pytest.approx(slow.step_time - plan.timeline.step_time)
    assert found.seconds("imbalance") == pytest.approx(0.0, abs=1e-9)


def test_time_between_calls_is_overhead():
    plan = even()
    timeline = plan.timeline
    shorter = [
        dataclasses.replace(e, end=e.end - 0.2 * e.duration) if e.action.kind in COMPUTE else e for e in timeline.events
    ]
    found = account_of(plan, Timeline.from_events(4, [*shorter, *_waits(timeline)]), MeanStep(9, 0.1, 0.05, 0.0, 0.0))
    assert found is not None
    scale = 0.05 / timeline.step_time
    assert found.seconds("compute") == pytest.approx(scale * 0.8 * sum(timeline.busy) / 4, rel=0.02)
    assert found.seconds("overhead") == pytest.approx(scale * 0.2 * sum(timeline.busy) / 4, rel=0.1)


def _waits(timeline: Timeline) -> list[Event]:
    """An event of waiting wherever a stage has no compute between its first and its last one."""
    found = []
    for mine in timeline.compute:
        for before, after in pairwise(mine):
            if after.start - before.end > 1e-9:
                action = dataclasses.replace(after.action, kind="RECV", peer=0, payload="F")
                found.append(Event(before.stage, action, before.end, after.start))
    return found


def test_a_slower_traced_step_does_not_change_the_sum():
    plan = even()
    found = accounted(plan, plan.timeline, pipeline=0.5, whole=0.6, traced=1.0, optimizer=0.04, input=0.01)
    assert found.step == pytest.approx(0.6)
    assert found.seconds("compute") == pytest.approx(0.5 * sum(plan.timeline.busy) / 4)


def test_another_schedule_has_no_account():
    plan = even()
    assert account_of(plan, even("zb_h1").timeline, MeanStep(9, 1.0, 0.9, 0.0, 0.0)) is None
    assert account_of(plan, Timeline(4, ()), MeanStep(9, 1.0, 0.9, 0.0, 0.0)) is None


def test_a_smaller_batch_has_an_account():
    plan = even()
    fewer = simulate(plan.make_schedule(3), plan.costs, plan.edges)
    assert accounted(plan, fewer).seconds("bubble") == pytest.approx(fewer.step_time - sum(fewer.busy) / 4)


def test_one_stage_is_compared_with_nothing():
    plan = sample_plan(1, 1, 2, "gpipe", skips=False)
    found = accounted(dataclasses.replace(plan, traffic=()), plan.timeline)
    assert found.alternatives == ()
    assert found.seconds("bubble") == pytest.approx(0.0, abs=1e-9)
    assert not found.advice.startswith("A pipeline")


# ---- replicas without a pipeline


def test_replicas_take_compute_update_and_exchange():
    links = (("between", 1e9, 1e-5),)
    plan = dataclasses.replace(even(), links=links, memory=(StageMemory(10, 10, 20, 30),) * 4, memory_limit=1e12)
    found = accounted(plan, plan.timeline)
    plain, sharded = found.alternatives
    compute = found.seconds("compute")
    ring = 2 * 3 * (4 * 4.8e6 / 4 / 1e9 + 1e-5)
    around = found.seconds("input") + found.seconds("trainer")
    assert plain.exchange == pytest.approx(max(ring - compute * 2 / 3, ring))  # it is one bucket, which nothing hides
    assert plain.seconds == pytest.approx(compute + plain.exchange + 4 * 0.004 + around)
    assert sharded.seconds == pytest.approx(compute + ring + 0.004 + around)
    saved = sum(chunk.saved_bytes for chunk in plan.chunks) * 8 / 4
    assert plain.memory == pytest.approx(4 * 40 + saved)
    assert sharded.memory == pytest.approx(4 * 25 + saved)
    assert not plain.assumed
    assert (plain.fits, sharded.fits) == (True, True)


def test_the_advice_says_whether_a_pipeline_is_worth_it():
    memory = (StageMemory(10, 10, 20, 30),) * 4
    plan = dataclasses.replace(even(), links=(("between", 1e12, 1e-6),), memory=memory, memory_limit=1e12)
    assert accounted(plan, plan.timeline).advice.startswith("A pipeline is not worth it here for speed: ")
    slow = dataclasses.replace(plan, links=(("between", 1e7, 1e-5),))
    assert accounted(slow, plan.timeline).advice.startswith("A pipeline is worth it here: ")
    small = dataclasses.replace(slow, memory_limit=100.0)
    assert accounted(small, plan.timeline).advice.startswith("A pipeline is needed here: ")
    unknown = dataclasses.replace(plan, links=())
    assert "links as the planner assumes them" in accounted(unknown, plan.timeline).advice
    assert "more micro-batches" in accounted(plan, plan.timeline).advice


# ---- files and text


def test_the_file_comes_back_and_others_are_refused(tmp_path):
    found = accounted(even(), even().timeline)
    path = save_account(tmp_path / "account.json", found)
    assert load_account(path) == found
    path.write_text(path.read_text().replace('"bubble"', '"bubbles"'))
    with pytest.raises(PlanError, match="parts"):
        load_account(path)
    with pytest.raises(PlanError, match="there is no account"):
        load_account(tmp_path / "other.json")


def test_the_text_has_every_part_and_the_advice():
    plan = even()
    found = accounted(plan, plan.timeline)
    text = plan_text(plan, plan.timeline, account=found)
    for part in found.parts:
        assert f"  {part.name} " in text
    assert text.endswith(found.advice)
