"""The states of the search against the definition, and the shortcuts of the search against doing without them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart.partition import Link, Problem, bottleneck
from pipepart.partition.bottleneck import States, best_path
from pipepart.partition.device_orders import device_orders
from pipepart.partition.downsets import DownsetStates, all_downsets
from pipepart.partition.linear_orders import LinearStates, linear_orders
from pipepart.partition.prepared import reduce_units
from pipepart.partition.result import chunk_costs
from pipepart.partition.unit_costs import NEVER, UnitCosts, make_unit_costs
from pipepart.partition.units import unit_graph

SETTINGS = settings(derandomize=True, deadline=None, max_examples=25)


def braid(seed: int, ops: int, idle: float = 0.3) -> Problem:
    """A long and narrow DAG: a few lines that fork and join, with skips."""
    rng = np.random.default_rng(seed)
    edges = set()
    for b in range(1, ops):
        for _ in range(int(rng.integers(1, 3))):
            edges.add((max(0, b - int(rng.integers(1, 4))), b))
        if rng.random() < 0.1:
            edges.add((int(rng.integers(0, b)), b))
    forward = rng.integers(1, 1000, ops) * 1e-4 * (rng.random(ops) > idle)
    return Problem(
        forward=forward,
        backward=2 * forward,
        parameter_bytes=rng.integers(0, 100, ops).astype(float),
        saved_bytes=rng.integers(0, 100, ops).astype(float),
        output_bytes=rng.integers(0, 100, ops).astype(float),
        edges=tuple(sorted(edges)),
        links=(Link(2e3, 1e-3),),
    )


def whole(problem: Problem, chunks: int) -> UnitCosts:
    return make_unit_costs(problem, unit_graph(problem), chunks)


def agrees_with_definition(problem: Problem, costs: UnitCosts, states: States, seed: int) -> None:
    """The middle one of three chunks, for random pairs of states."""
    rng = np.random.default_rng(seed)
    place = device_orders(problem, costs.slowness, 3, 1).nodes[2].before[0][1]
    last = len(states.work) - 1
    checked = 0
    for _ in range(60):
        source, target = sorted(int(x) for x in rng.integers(0, last + 1, 2))
        inside, outside = set(states.members(source).tolist()), set(states.members(target).tolist())
        load, traffic = states.loads(np.array([source]), np.array([target]), place, NEVER - 1)
        middle = outside - inside
        if not inside <= outside or not any(problem.forward[op] > 0 for op in middle):
            assert load[0, 0] == NEVER
            continue
        chunk_of = [0 if op in inside else 1 if op in outside else 2 for op in range(problem.ops)]
        cost = chunk_costs(problem, chunk_of, (0, 0, 0))[1]
        assert int(load[0, 0]) / costs.scale == pytest.approx(cost.load(problem.overlap, "none"), rel=1e-9)
        assert int(traffic[0, 0]) == cost.traffic_bytes
        checked += 1
    assert checked


@SETTINGS
@given(seed=st.integers(0, 10**6), ops=st.integers(12, 80))
@pytest.mark.slow
def test_linear_states_follow_the_definition(seed: int, ops: int) -> None:
    problem = braid(seed, ops)
    costs = whole(problem, 3)
    for _, order in linear_orders(costs):
        agrees_with_definition(problem, costs, LinearStates(costs, order), seed)


@SETTINGS
@given(seed=st.integers(0, 10**6), ops=st.integers(12, 150))
def test_downsets_follow_the_definition(seed: int, ops: int) -> None:
    problem = braid(seed, ops)
    costs = whole(problem, 3)
    downsets = all_downsets(costs, 5000)
    if downsets is not None:
        agrees_with_definition(problem, costs, DownsetStates(costs, downsets, complete=True), seed)


def test_all_downsets_of_small_orders() -> None:
    def count(edges: tuple[tuple[int, int], ...], ops: int) -> int:
        problem = dataclasses.replace(braid(0, ops), edges=edges)
        return len(all_downsets(whole(problem, 2), 10**6) or [])

    assert count(((0, 1), (1, 2), (2, 3)), 4) == 5
    assert count((), 4) == 16
    assert count(((0, 1), (0, 2), (1, 3), (2, 3)), 4) == 6
    assert all_downsets(whole(dataclasses.replace(braid(0, 20), edges=()), 2), 1000) is None


@SETTINGS
@given(seed=st.integers(0, 10**6), ops=st.integers(12, 40), chunks=st.integers(2, 9))
def test_reductions_and_tables_lose_nothing(seed: int, ops: int, chunks: int) -> None:
    problem = braid(seed, ops, idle=0.6)
    costs = whole(problem, chunks)
    if int(costs.amounts.needed.sum()) < chunks:
        return
    reduced, _ = reduce_units(costs, memory_matters=False)
    assert reduced.units <= costs.units
    downsets, fewer = all_downsets(costs, 1000), all_downsets(reduced, 1000)
    if downsets is None or fewer is None:
        return
    assert len(fewer) <= len(downsets)
    devices = device_orders(problem, costs.slowness, chunks, 1)
    for goal in ("bottleneck", "traffic"):
        limit = NEVER - 1
        if goal == "traffic":
            best = best_path(DownsetStates(costs, downsets, complete=True), devices, limit)
            assert best is not None
            limit = best.bottleneck
        answers = []
        for many, states in ((costs, downsets), (reduced, fewer)):
            for most in (bottleneck._MOST_IN_TABLE, 0):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(bottleneck, "_MOST_IN_TABLE", most)
                    found = best_path(DownsetStates(many, states, complete=True), devices, limit, goal=goal)
                assert found is not None
                answers.append(found.bottleneck if goal == "bottleneck" else found.traffic)
        assert len(set(answers)) == 1
