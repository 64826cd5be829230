"""Laying a plan over another step of the same model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_samples import chain, planned, random_graph, sample_costs, sizes_of

from pipepart.errors import PlanError
from pipepart.graph import OpGraph
from pipepart.planning import transfer


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), stages=st.integers(1, 4))
def test_a_plan_laid_over_its_own_graph_is_valid_and_keeps_the_parameters(seed: int, stages: int) -> None:
    graph = random_graph(seed)
    costs, sizes = sample_costs(graph, seed), sizes_of(graph)
    plan = planned(graph, costs, 1, sizes, stages=stages, microbatches=2, schedule="gpipe")
    found = transfer(graph, plan.chunk_of, graph, stages)
    homes: dict[str, set[int]] = {}
    for op, chunk in zip(graph.ops, plan.chunk_of):
        for name in op.parameters:
            homes.setdefault(name, set()).add(chunk)
    for op in graph.ops:
        assert all(found[op.name] in homes[name] for name in op.parameters)
    for a, b in graph.edges:
        assert found[graph.ops[a].name] <= found[graph.ops[b].name]


def test_ops_that_are_left_out_and_added_find_a_place() -> None:
    graph = chain(6)
    plan = planned(graph, sample_costs(graph), 1, sizes_of(graph), stages=2, microbatches=2, schedule="gpipe")
    shorter = OpGraph(graph.ops[:4], tuple((a, b) for a, b in graph.edges if a < 4 and b < 4), (), "1" * 64)
    found = transfer(graph, plan.chunk_of, shorter, 2)
    assert [found[f"op{i}"] for i in range(3)] == [plan.chunk_of[i + 1] for i in range(3)]


def test_another_order_of_the_stages_is_refused_by_name() -> None:
    graph = chain(4)
    chunk_of = [0, 0, 0, 1, 1, 1]
    ops = (graph.ops[0], *reversed(graph.ops[1:5]), graph.ops[5])
    backwards = OpGraph(ops, tuple((i, i + 1) for i in range(5)), (), "2" * 64)
    with pytest.raises(PlanError, match="another order"):
        transfer(graph, chunk_of, backwards, 2)
