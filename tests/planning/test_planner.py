"""From costs to a plan: better than the simple splits, above its bound, within memory, the same every time."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_samples import chain, random_graph, sample_costs, sizes_of
from planning_samples import planned as plan_of

from pipepart.cost import OpCosts
from pipepart.cost.cluster import Cluster, DeviceKind, LinkKind, Node
from pipepart.errors import PlanError, ScheduleError
from pipepart.graph import OpGraph
from pipepart.planning import Layout, Plan, PlanRequest, auto_microbatches, search
from pipepart.planning.layout import Handling
from pipepart.planning.memory import ParameterSize
from pipepart.planning.pricing import Pricing
from pipepart.planning.request import MicrobatchCount, PlanOptions, Shape, schedule_choices
from pipepart.planning.splits import Case, Mover
from pipepart.schedule import step_time, validate


def planned(graph: OpGraph, seed: int = 0, **request: object) -> Plan:
    return plan_of(graph, sample_costs(graph, seed), 2, sizes_of(graph), **request)  # type: ignore[arg-type]


def naive_traffic(graph: OpGraph, plan: Plan) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    sent = set()
    for source, target in graph.edges:
        a, b = plan.chunk_of[source], plan.chunk_of[target]
        if a != b and (source, b) not in sent and not graph.ops[source].replicable:
            sent.add((source, b))
            found[a, b] = found.get((a, b), 0) + graph.ops[source].output_bytes
    return found


def ops_run_by(graph: OpGraph, plan: Plan, chunk: int) -> set[int]:
    """The ops of a chunk; those that are copied to where they are used run there, or at home if nobody uses them."""
    ops = graph.ops
    found = {i for i, home in enumerate(plan.chunk_of) if home == chunk and not ops[i].replicable}
    for source, target in sorted(graph.edges, reverse=True):
        if ops[source].replicable and target in found:
            found.add(source)
    used = {source for source, _ in graph.edges}
    return found | {i for i, home in enumerate(plan.chunk_of) if home == chunk and i not in used}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), stages=st.integers(1, 3), microbatches=st.integers(1, 6))
def test_every_plan_is_valid_bounded_and_no_worse_than_the_simple_splits(
    seed: int, stages: int, microbatches: int
) -> None:
    graph = random_graph(seed)
    costs = sample_costs(graph, seed)
    plan = planned(graph, seed, stages=stages, microbatches=microbatches, schedule="1f1b")
    assert all(plan.chunk_of[a] <= plan.chunk_of[b] for a, b in graph.edges)
    assert all(len({plan.chunk_of[i] for i in group}) == 1 for group in graph.colocated)
    assert plan.lower_bound <= plan.step_time * (1 + 1e-9)
    assert all(plan.step_time <= seconds * (1 + 1e-9) for _, seconds in plan.baselines)
    for index, chunk in enumerate(plan.chunks):
        runs = ops_run_by(graph, plan, index)
        assert chunk.forward == pytest.approx(sum(costs.forward[op] for op in runs))
        assert chunk.backward == pytest.approx(sum(costs.backward[op] for op in runs))
    assert {(t.source, t.target): t.forward_bytes for t in plan.traffic} == naive_traffic(graph, plan)
    validate(plan.make_schedule(), plan.edges.forward, plan.edges.backward)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
@pytest.mark.slow
def test_the_same_input_gives_the_same_plan(seed: int) -> None:
    graph = random_graph(seed)
    plans = [planned(graph, seed, stages=2, microbatches=4) for _ in range(2)]
    assert plans[0].hash == plans[1].hash


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"])
def test_every_schedule_can_be_planned_and_proved(schedule: str) -> None:
    graph = chain(12)
    plan = planned(graph, stages=2, microbatches=4, schedule=schedule)
    assert plan.schedule == schedule
    validate(plan.make_schedule(), plan.edges.forward, plan.edges.backward)
    assert plan.lower_bound <= plan.step_time


def test_auto_is_no_slower_than_any_schedule_by_name() -> None:
    graph = chain(12)
    auto = planned(graph, stages=3, microbatches=6)
    for schedule in ("gpipe", "1f1b", "zb_h1", "zb_v"):
        # a small price for more parts is on purpose: 1 % for each
        assert auto.step_time <= planned(graph, stages=3, microbatches=6, schedule=schedule).step_time * 1.021


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_a_chain_gets_the_best_of_all_its_splits(schedule: str) -> None:
    graph = chain(9)
    costs = sample_costs(graph, 3)
    plan = planned(graph, 3, stages=3, microbatches=3, schedule=schedule, slack=0)
    pricing = Pricing(graph, (costs,), sizes_of(graph), Layout.uniform(3, 1))
    steps = []
    for first, second in itertools.combinations(range(1, 9), 2):
        inner = [(i >= first) + (i >= second) for i in range(9)]
        priced = pricing.price([0, *inner, 2], (0, 1, 2))
        if plan.make_schedule().splits_backward:
            priced = pricing.in_two_halves(priced, [0, *inner, 2])
        steps.append(step_time(plan.make_schedule(), priced.costs((False,) * 3), priced.edges))
    assert plan.step_time == pytest.approx(min(steps), rel=1e-5)


def test_moves_find_the_way_from_a_bad_split() -> None:
    graph = chain(12)
    pricing = Pricing(graph, (sample_costs(graph),), sizes_of(graph), Layout.uniform(2, 1))
    request = PlanRequest(8, stages=2, replicas=1, schedule="1f1b", slack=0)
    case = Case(pricing, request, Shape(2, 1, 4, 2))
    choice = schedule_choices(request, 2)[0]
    schedule = case.make_schedule(choice)
    bad = np.array([0] + [0] * 2 + [1] * 10 + [1])
    start = case.judge(choice, schedule, bad)
    found = Mover(case.problem((0, 1))).improve(
        bad, 2, lambda chunk_of: case.judge(choice, schedule, chunk_of).score, start.score, 200
    )
    assert 0 < found.spent <= 200
    assert found.score < start.score
    assert found.score[1] == pytest.approx(case.best(choice).step, rel=1e-3)
    assert all(found.chunk_of[a] <= found.chunk_of[b] for a, b in graph.edges)


def test_memory_is_counted_by_kind() -> None:
    graph = chain(8, parameter_bytes=4000)
    plan = planned(graph, stages=2, microbatches=4, schedule="gpipe", optimizer_factor=2.0)
    for stage, memory in enumerate(plan.memory):
        chunk = plan.chunks[stage]
        assert (memory.weights, memory.gradients, memory.optimizer) == (
            chunk.parameter_bytes,
            chunk.parameter_bytes,
            2 * chunk.parameter_bytes,
        )
        assert memory.activations == 4 * chunk.saved_bytes  # GPipe keeps all micro-batches


def test_recompute_where_memory_asks_for_it() -> None:
    graph = chain(8)
    free = planned(graph, stages=2, microbatches=8, schedule="gpipe")
    limit = 0.6 * max(memory.total for memory in free.memory)
    tight = planned(graph, stages=2, microbatches=8, schedule="gpipe", memory_limit=limit)
    assert any(tight.recompute)
    assert all(memory.total <= limit for memory in tight.memory)
    assert tight.step_time > free.step_time
    everywhere = planned(graph, stages=2, microbatches=8, schedule="gpipe", recompute=True)
    assert everywhere.recompute == (True, True)


def test_auto_takes_the_schedule_that_fits() -> None:
    graph = chain(8)
    few = planned(graph, stages=2, microbatches=8, schedule="1f1b", slack=0)
    limit = 1.05 * max(memory.total for memory in few.memory)
    plan = planned(graph, stages=2, microbatches=8, memory_limit=limit, recompute=False)
    assert all(memory.total <= limit for memory in plan.memory)
    with pytest.raises(PlanError, match="no split fits"):
        planned(graph, stages=2, microbatches=8, memory_limit=limit, recompute=False, schedule="gpipe")


def test_nothing_fits_says_how_much_where_and_what_would() -> None:
    graph = chain(8)
    free = planned(graph, stages=2, microbatches=8, schedule="gpipe")
    limit = 0.6 * max(memory.total for memory in free.memory)
    with pytest.raises(PlanError) as caught:
        planned(graph, stages=2, microbatches=8, schedule="gpipe", recompute=False, memory_limit=limit)
    text = str(caught.value)
    for part in ("stage ", "more than its", "activations", "recompute='auto'", "stages="):
        assert part in text
    with pytest.raises(PlanError, match="Neither recompute"):
        planned(graph, stages=2, microbatches=8, schedule="gpipe", memory_limit=100.0)


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state() -> None:
    graph = chain(6)
    names = list(sizes_of(graph))
    plan = plan_of(graph, sample_costs(graph), 2, sizes_of(graph), stages=1, frozen=set(names[:3]))
    assert plan.memory[0].weights == 6 * 4000
    assert plan.memory[0].gradients == 3 * 4000


def test_forced_cuts_stay_where_they_are() -> None:
    graph = chain(8)
    plan = planned(graph, stages=2, microbatches=4, split_at=("layers.1",), schedule="1f1b")
    assert [chunk.first for chunk in plan.chunks] == ["layers.0", "layers.1"]
    together = planned(graph, stages=2, microbatches=4, keep_together=(("layers.2", "layers.6"),), schedule="1f1b")
    of = dict(zip(together.ops, together.chunk_of))
    assert of["op2"] == of["op6"]
    with pytest.raises(PlanError, match=r"layers\.1"):
        planned(graph, stages=2, microbatches=4, split_at=("layer.1",))


def test_costs_of_another_graph_are_refused() -> None:
    with pytest.raises(PlanError, match="another graph"):
        plan_of(chain(4), sample_costs(chain(5)), 1, sizes_of(chain(5)), stages=1)


def test_requests_are_checked_before_anything_is_measured() -> None:
    with pytest.raises(ScheduleError, match="did you mean '1f1b'"):
        PlanOptions(schedule="1f1")
    with pytest.raises(PlanError, match="microbatches"):
        PlanOptions(microbatches=0)
    with pytest.raises(PlanError, match="recompute"):
        PlanOptions(recompute="full")
    assert auto_microbatches(1, 32) == 1
    assert auto_microbatches(4, 8) == 8


def test_what_is_no_layer_makes_its_weight_gradients_at_once() -> None:
    graph = chain(6)
    ops = [dataclasses.replace(op, module_class="Experts") if i in (2, 3) else op for i, op in enumerate(graph.ops)]
    graph = OpGraph(tuple(ops), graph.edges, (), graph.hash)
    costs = sample_costs(graph, 1)
    pricing = Pricing(graph, (costs,), sizes_of(graph), Layout.uniform(2, 1, handling=Handling()))
    whole = pricing.price([0, 0, 0, 0, 1, 1, 1, 1], (0, 1))
    halves = pricing.in_two_halves(whole, [0, 0, 0, 0, 1, 1, 1, 1])
    at_once = costs.backward_weight[2] + costs.backward_weight[3]
    for before, after, moved in zip(whole.chunks, halves.chunks, (at_once, 0.0)):
        assert after.backward_input == pytest.approx(before.backward_input + moved)
        assert after.backward_weight == pytest.approx(before.backward_weight - moved)


def test_a_matrix_on_two_stages_is_summed_at_the_end() -> None:
    graph = chain(8)
    ops = [dataclasses.replace(op, parameters=("shared",)) if i in (1, 8) else op for i, op in enumerate(graph.ops)]
    tied = OpGraph(tuple(ops), graph.edges, (), graph.hash)
    sizes = {**sizes_of(graph), "shared": ParameterSize(1000, 4000)}
    fixed = {"stages": 2, "microbatches": 4, "schedule": "1f1b"}
    plan = plan_of(tied, sample_costs(graph), 2, sizes, **fixed)
    (tie,) = plan.ties
    assert (tie.chunks, tie.size) == ((0, 1), 4000)
    last = max(event.end for mine in plan.timeline.compute for event in mine)
    assert {e.start for e in plan.timeline.events if e.action.kind == "REDUCE"} == {last}
    assert Plan.from_json(plan.to_json()) == plan
    alone = plan_of(tied, sample_costs(graph), 2, sizes, frozen={"shared"}, **fixed)
    assert alone.ties == ()


def test_stages_with_costs_of_their_own() -> None:
    graph = chain(9)
    fast = sample_costs(graph)
    slow = dataclasses.replace(
        fast,
        forward=tuple(3 * t for t in fast.forward),
        backward_input=tuple(3 * t for t in fast.backward_input),
        backward_weight=tuple(3 * t for t in fast.backward_weight),
    )

    class Source:
        def at(self, microbatch_size: int, kind: str) -> OpCosts:
            return {"fast": fast, "slow": slow}[kind]

    kinds = {kind: DeviceKind(kind, {"float32": 1e9}, 1e10, 1e9) for kind in ("fast", "slow")}
    links = {"wire": LinkKind("wire", 1e10, 1e-6)}
    cluster = Cluster("two", kinds, links, (Node(("fast", "slow"), "wire"),), "wire")
    request = PlanRequest(16, cluster=cluster, stages=2, replicas=1, counts=(MicrobatchCount(8, 2),), schedule="1f1b")
    plan = search(graph, Source(), sizes_of(graph), request)
    assert plan.chunks[0].ops > plan.chunks[1].ops
    assert plan.lower_bound <= plan.step_time
