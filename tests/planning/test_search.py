"""The search with given numbers of micro-batches: the usual one, unless another is clearly faster or alone fits."""

import pytest
from planning_samples import CostsBySize, chain, sample_costs, sizes_of

from pipepart.cost import OpCosts
from pipepart.errors import PartitionError, PlanError
from pipepart.planning import MicrobatchCount, Plan, PlanRequest, search

BATCH = 32
COUNTS = (MicrobatchCount(8, 4), MicrobatchCount(4, 8), MicrobatchCount(16, 2))


def costs_of(seconds: dict[int, float], saved: int = 10_000) -> CostsBySize:
    """Costs of a chain by the size of a micro-batch: ``seconds`` is the compute of the whole batch, in some unit."""
    usual = sample_costs(chain(8), saved=saved)
    found: dict[int, OpCosts] = {}
    for count in COUNTS:
        time = seconds[count.microbatches] * count.size / 4
        found[count.size] = usual.scaled(count.size / 4, time, time)
    return CostsBySize(found)


def chosen(seconds: dict[int, float], **request: object) -> Plan:
    graph, fixed = chain(8), {"schedule": "gpipe", **request}
    asked = PlanRequest(BATCH, stages=2, replicas=1, each_replica=True, counts=COUNTS, **fixed)  # type: ignore[arg-type]
    return search(graph, costs_of(seconds), sizes_of(graph), asked)


def test_the_usual_number_unless_another_is_clearly_faster() -> None:
    alone = {}
    for count in COUNTS:
        one = PlanRequest(BATCH, stages=2, replicas=1, counts=(count,), schedule="gpipe")
        graph = chain(8)
        alone[count.microbatches] = search(graph, costs_of({8: 1.0, 4: 1.0, 16: 1.0}), sizes_of(graph), one).step_time
    even = {count: alone[8] / alone[count] for count in alone}  # with these all three steps are about the same
    assert chosen(even).microbatches == 8
    assert chosen({**even, 4: 0.98 * even[4]}).microbatches == 8
    assert chosen({**even, 4: 0.9 * even[4], 16: 0.95 * even[16]}).microbatches == 4
    plan = chosen({**even, 16: 0.8 * even[16]})
    assert (plan.microbatches, plan.microbatch_size) == (16, 2)
    assert any("8 micro-batches" in name for name, _ in plan.tried)


def test_a_number_that_fits_into_memory_is_taken_where_the_usual_one_does_not() -> None:
    same = {8: 1.0, 4: 1.0, 16: 2.0}
    fixed = {"schedule": "1f1b", "slack": 0, "recompute": False}
    free = chosen({8: 1.0, 4: 3.0, 16: 3.0}, **fixed)
    limit = 0.8 * max(memory.total for memory in free.memory)
    plan = chosen(same, memory_limit=limit, **fixed)
    assert plan.microbatches == 16
    assert max(memory.total for memory in plan.memory) <= limit
    with pytest.raises(PlanError, match=r"no split fits.*8 micro-batches"):
        chosen(same, memory_limit=limit / 4, **fixed)


def test_the_first_refusal_is_said_where_the_model_cannot_be_cut() -> None:
    graph = chain(2)
    asked = PlanRequest(BATCH, stages=5, replicas=1, counts=COUNTS[:1], schedule="1f1b")
    with pytest.raises(PartitionError):
        search(graph, CostsBySize(sample_costs(graph)), sizes_of(graph), asked)


def test_a_fixed_mesh_is_one_point_and_needs_no_number_of_devices() -> None:
    graph = chain(8)
    source, sizes = CostsBySize(sample_costs(graph)), sizes_of(graph)
    plan = search(graph, source, sizes, PlanRequest(BATCH, stages=2, replicas=2, microbatches=4))
    assert (plan.stages, plan.replicas, plan.microbatches, plan.microbatch_size) == (2, 2, 4, 4)
    assert plan.tried
    assert all(" x " not in name and "micro-batches" not in name for name, _ in plan.tried)
    with pytest.raises(PlanError, match=r"fixes the mesh.*replicas='auto'"):
        PlanRequest(BATCH, stages=2)
    with pytest.raises(PlanError, match="batch_size must be at least 1"):
        PlanRequest(0, devices=2)
