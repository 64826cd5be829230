"""The option `head`: where the planner runs a head in slices, and what it says about the memory and the time of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from planning_samples import chain, planned, sample_costs, sizes_of
from support.heads import Model, batch

from pipepart import Plan, PlanError, plan
from pipepart.cost import OpCosts
from pipepart.graph import HeadOps, OpGraph
from pipepart.planning.head_choice import sliced_costs, sliced_graph, tokens_of_slice

ROWS, CLASSES, OPS = 1000, 20_000, 30
SCORES = ROWS * CLASSES * 4


def _headed(classes: int = CLASSES) -> tuple[OpGraph, OpCosts]:
    """A chain that ends in a linear layer, a view of its scores and a loss, which keeps as much as the scores."""
    graph = chain(OPS)
    linear, view, loss = OPS - 2, OPS - 1, OPS  # the input is at 0
    ops = list(graph.ops)
    for index in (linear, view):
        ops[index] = replace(ops[index], shape=(ROWS, classes), output_bytes=ROWS * classes * 4)
    graph = replace(graph, ops=tuple(ops), heads=(HeadOps(linear, loss, (view,), linear - 1, classes),))
    costs = sample_costs(graph)
    saved = list(costs.saved_bytes)
    saved[loss] = ROWS * classes * 4
    return graph, replace(costs, saved_bytes=tuple(saved))


def _plan(classes: int = CLASSES, **options: Any) -> Plan:
    graph, costs = _headed(classes)
    return planned(graph, costs, 1, sizes_of(graph), stages=2, microbatches=4, schedule="1f1b", **options)


def _peak(made: Plan) -> int:
    return max(memory.total for memory in made.memory)


def test_costs_of_a_head_in_slices() -> None:
    graph, costs = _headed()
    (head,) = graph.heads
    sliced = sliced_costs(costs, graph, 100)
    assert sum(costs.saved_bytes) - sum(sliced.saved_bytes) > 0.99 * SCORES
    assert sliced.output_bytes[head.linear] == SCORES / 10
    assert sum(sliced.saved_bytes[op] for op in head.ops) < 50_000
    # The scores and their gradient are computed twice, the gradients of hidden states and weight once.
    others = (*head.between, head.loss)
    scores = costs.forward[head.linear] + sum(costs.forward[op] + costs.backward[op] for op in others)
    assert sliced.forward[head.linear] == pytest.approx(scores + costs.backward_input[head.linear])
    assert sliced.backward_input[head.linear] == 0
    assert sliced.backward_weight[head.linear] == pytest.approx(scores + costs.backward_weight[head.linear])
    assert all(sliced.forward[op] == sliced.backward[op] == 0 for op in others)
    assert all(sliced.forward[op] == costs.forward[op] for op in range(len(graph)) if op not in head.ops)
    assert sliced_graph(graph).colocated[-1] == head.ops


def test_slices_are_chosen_by_the_vocabulary() -> None:
    assert [tokens_of_slice(_headed(classes)[0]) for classes in (100, 32_000, 128_000, 10**6)] == [8192, 512, 128, 64]


def test_plans_with_whole_heads_are_as_before() -> None:
    default, whole = _plan(1000), _plan(1000, head="whole")
    assert default == whole
    assert {"head", "head_note"}.isdisjoint(json.loads(default.to_json()))
    assert "head " not in default.describe()


def test_a_head_that_is_asked_for_in_slices() -> None:
    whole, sliced = _plan(head="whole"), _plan(head={"slice": 32})
    assert (whole.head, sliced.head, _plan(head="sliced").head) == (0, 32, 512)
    assert "head       in slices of 32 tokens" in sliced.describe()
    assert sliced.memory[1].total < whole.memory[1].total / 4
    assert Plan.from_json(sliced.to_json()) == sliced
    assert sliced.hash == _plan(head={"slice": 32}).hash != whole.hash


def test_auto_takes_slices_where_the_limit_demands_it() -> None:
    options = {"memory_limit": 2.0 * SCORES, "recompute": False}
    with pytest.raises(PlanError, match="no split fits into memory"):
        _plan(head="whole", **options)
    found = _plan(**options)
    assert found.head == 512
    assert _peak(found) <= 2 * SCORES
    (head,) = _headed()[0].heads
    assert len({found.chunk_of[op] for op in head.ops}) == 1
    with pytest.raises(PlanError, match="no split fits into memory"):
        _plan(memory_limit=1e4)


def test_auto_takes_slices_where_scores_are_the_peak() -> None:
    assert _plan().head == 512, "80 MB of scores on the fullest stage"
    assert _plan(10_000).head == 0, "40 MB of scores"
    assert _peak(_plan()) < 0.75 * _peak(_plan(head="whole"))


def test_the_reason_why_a_head_is_whole() -> None:
    def read(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = m.head(h)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten()) + 0.0 * scores.mean()

    fixed: dict[str, Any] = {"cluster": "h100", "devices": 1, "cost": "analytic"}
    found = plan(Model(read), batch(), head="sliced", **fixed)
    assert found.head == 0
    assert "its scores are also read by 'mean'" in found.head_note
    assert f"head       whole: {found.head_note}" in found.describe()
    assert plan(Model(read), batch(), **fixed).head_note == ""
