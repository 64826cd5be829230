"""The plan as data: out to JSON and back, by version, with clear refusals."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_samples import chain, planned, random_graph, sample_costs, sizes_of

from pipepart.errors import PlanError
from pipepart.planning import Plan


def sample_plan(**request: object) -> Plan:
    graph = chain(8)
    return planned(graph, sample_costs(graph), 2, sizes_of(graph), stages=2, microbatches=4, **request)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), stages=st.integers(1, 3), microbatches=st.integers(1, 5))
def test_round_trip_keeps_everything(seed: int, stages: int, microbatches: int) -> None:
    graph = random_graph(seed)
    costs, sizes = sample_costs(graph, seed), sizes_of(graph)
    plan = planned(graph, costs, 2, sizes, stages=stages, microbatches=microbatches, schedule="1f1b")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert again.step_time == plan.step_time
    assert again.describe() == plan.describe()


def test_files(tmp_path) -> None:
    plan = sample_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_file_that_was_written_before_is_read_and_written_as_it_was() -> None:
    """Two replicas with ties, recomputation, a memory limit and a rehearsal."""
    path = Path(__file__).parent / "plan_of_version_1.json"
    plan = Plan.load(path)
    assert (plan.stages, plan.replicas, plan.recompute, plan.rehearsed) == (2, 2, (True, True), 0.125)
    assert plan.step_time == pytest.approx(0.1575314332632278)
    assert plan.hash == "489ee4a3f3ecc831"
    assert plan.to_json() + "\n" == path.read_text()
    assert "2 of 2 chunks recompute" in plan.describe()


def test_a_plan_without_the_later_fields_can_be_read() -> None:
    data = json.loads(sample_plan().to_json())
    for name in ("recompute", "memory", "memory_limit", "cluster", "tried"):
        del data[name]
    for chunk in data["chunks"]:
        del chunk["received_bytes"], chunk["reduce"]
    plan = Plan.from_json(json.dumps(data))
    assert plan.recompute == ()
    assert plan.step_time == pytest.approx(sample_plan().step_time)
    assert "predicted" in plan.describe()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not a plan"),
        ("[1]", "not a plan: the file is a list"),
        ('{"version": 99}', "99"),
        ('{"version": 1}', "not a plan"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, part: str) -> None:
    with pytest.raises(PlanError, match=part):
        Plan.from_json(text)


def test_the_hash_depends_on_the_content() -> None:
    plan = sample_plan()
    assert plan.hash != dataclasses.replace(plan, slack=plan.slack + 1).hash
    assert plan.hash != dataclasses.replace(plan, recompute=(True, False)).hash


def test_recompute_takes_the_time_of_a_forward_and_keeps_the_inputs() -> None:
    plan = sample_plan(schedule="gpipe")
    again = dataclasses.replace(plan, recompute=(False, True))
    assert again.costs.recompute == (0.0, plan.chunks[1].forward)
    assert again.costs.activation == (plan.chunks[0].saved_bytes, plan.chunks[1].received_bytes)
    assert again.timeline.busy[1] == pytest.approx(plan.timeline.busy[1] + plan.microbatches * plan.chunks[1].forward)


def test_describe_says_memory_bound_and_limits() -> None:
    text = sample_plan(memory_limit=1e9).describe()
    for word in (
        "memory",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "limit 1 GB",
        "bound",
        "limits",
        "against",
    ):
        assert word in text


def test_a_rehearsal_is_kept_and_changes_what_is_predicted_but_not_the_hash() -> None:
    plan = sample_plan()
    assert plan.predicted == plan.step_time
    tried = dataclasses.replace(plan, rehearsed=2 * plan.step_time)
    assert tried.predicted == 2 * plan.step_time
    assert tried.step_time == plan.step_time
    assert tried.hash == plan.hash
    assert Plan.from_json(tried.to_json()) == tried
    assert "(+100%)" in tried.describe()
