"""`plan`: any cluster, no process, everything auto."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from planning_samples import planned
from torch import nn

from pipepart.cost import OpCosts
from pipepart.cost.cluster import Cluster, DeviceKind, LinkKind, Node
from pipepart.cost.op_costs import write_costs
from pipepart.errors import PlanError
from pipepart.graph import capture
from pipepart.planning import Plan, PlanOptions, plan
from pipepart.planning.entry import Target, plan_for
from pipepart.planning.layout import Layout
from pipepart.planning.memory import ParameterSize
from pipepart.planning.sources import resized
from pipepart.schedule import make_schedule, to_csv, validate


class Net(nn.Module):
    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x)), y)


def example(size: int = 16, width: int = 256, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, width, device=device), torch.zeros(size, dtype=torch.long, device=device)


def cluster(count: int = 4, memory: float = 1e9, bandwidth: float = 1e10, kinds: tuple[str, ...] = ("gpu",)) -> Cluster:
    speeds = {kind: 1e9 / 3**i for i, kind in enumerate(kinds)}
    devices = {k: DeviceKind(k, {"float32": speed}, 1e10, memory, 1.0, 0.0) for k, speed in speeds.items()}
    each = tuple(kinds[i * len(kinds) // count] for i in range(count))
    return Cluster("sample", devices, {"wire": LinkKind("wire", bandwidth, 1e-6)}, (Node(each, "wire"),), "wire")


def test_everything_auto_on_a_cluster_that_is_not_there() -> None:
    found = plan(Net(), example(), cluster=cluster(), batch_size=64)
    assert found.replicas * found.stages == 4
    assert found.replicas * found.batch_size >= 64
    assert found.cluster == "sample"
    assert found.cost_source == "analytic"
    assert found.lower_bound <= found.step_time * (1 + 1e-9)
    validate(found.make_schedule(), found.edges.forward, found.edges.backward)
    assert "4 device(s) of sample" in found.describe()


def test_the_same_plan_every_time() -> None:
    assert plan(Net(), example(), cluster=cluster()).hash == plan(Net(), example(), cluster=cluster()).hash


def test_auto_is_the_best_of_all_fixed_shapes() -> None:
    captured = capture(Net(), example())
    auto = plan(captured, cluster=cluster(), batch_size=64)
    for stages, replicas in ((1, 4), (2, 2), (4, 1)):
        for schedule in ("1f1b", "gpipe"):
            fixed = plan(
                captured, cluster=cluster(), batch_size=64, stages=stages, replicas=replicas, schedule=schedule
            )
            assert auto.step_time <= fixed.step_time * 1.021, (stages, replicas, schedule)


@pytest.mark.slow
def test_a_batch_of_each_replica_is_planned_for_samples_per_second() -> None:
    captured = capture(Net(), example())
    target = Target(cluster(), batch_size=16, each_replica=True)
    found = plan_for(captured, None, None, PlanOptions(), target)
    assert found.batch_size >= 16

    def rate(one: Plan) -> float:
        return one.replicas * one.batch_size / one.step_time

    for stages, replicas in ((1, 4), (2, 2), (4, 1)):
        fixed = plan_for(captured, None, None, PlanOptions(stages=stages, replicas=replicas), target)
        assert fixed.batch_size >= 16
        assert rate(found) >= rate(fixed) / 1.021, (stages, replicas)


def test_a_schedule_from_a_file_says_its_stages_and_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(to_csv(make_schedule("gpipe", stages=2, microbatches=4)))
    found = plan(Net(), example(), cluster=cluster(), batch_size=64, schedule=str(path))
    assert (found.stages, found.replicas, found.microbatches) == (2, 2, 4)
    assert found.make_schedule().actions == make_schedule("gpipe", stages=2, microbatches=4).actions


@pytest.mark.slow
def test_a_fast_network_makes_replicas_and_a_slow_one_makes_stages() -> None:
    wide = plan(Net(), example(), cluster=cluster(bandwidth=1e13), batch_size=64)
    assert (wide.replicas, wide.stages) == (4, 1)
    narrow = plan(Net(width=512), example(width=512), cluster=cluster(bandwidth=2e8), batch_size=64)
    assert narrow.stages > 1


def test_memory_makes_stages() -> None:
    parameters = sum(p.numel() * 4 for p in Net().parameters())
    found = plan(Net(), example(), cluster=cluster(bandwidth=1e13), batch_size=64, memory_limit=parameters * 4 / 2.5)
    assert found.stages == 4
    assert all(memory.total <= parameters * 4 / 2.5 for memory in found.memory)


def test_replicas_that_divide_updates_have_room_for_more() -> None:
    """With 4 replicas a rank keeps half a number of Adam for each parameter, in place of two."""
    options = {"cluster": cluster(), "batch_size": 64, "stages": 1, "replicas": 4, "cost": "analytic"}
    memory = {sync: plan(Net(), example(), sync=sync, **options).memory[0] for sync in ("mean", "sharded", "master")}
    assert memory["sharded"].optimizer == memory["mean"].optimizer // 4 == memory["mean"].weights // 2
    assert memory["master"] == memory["mean"]  # the plan is for the replica with most
    whole = memory["mean"].total
    with pytest.raises(PlanError, match="memory"):
        plan(Net(), example(), memory_limit=whole * 0.9, recompute=False, **options)
    plan(Net(), example(), memory_limit=whole * 0.9, recompute=False, sync="sharded", **options)


@pytest.mark.slow
def test_a_model_that_fits_nowhere() -> None:
    with pytest.raises(PlanError, match=r"does not fit on 4 device\(s\).*use devices="):
        plan(Net(), example(), cluster=cluster(), memory_limit=1e5)
    parameters = sum(p.numel() * 4 for p in Net().parameters())
    with pytest.raises(PlanError, match=r"no split fits.*stage .* of 2 on 'gpu' needs .*more than its.*stages="):
        plan(Net(), example(), cluster=cluster(), stages=2, memory_limit=parameters * 4 / 2.5)


def test_the_meta_device_is_enough_for_analytic_costs() -> None:
    with torch.device("meta"):
        model = Net()
    found = plan(model, example(device="meta"), cluster=cluster(), stages=2, replicas=2)
    assert found.stages == 2
    with pytest.raises(PlanError, match="meta"):
        plan(model, example(device="meta"), cost="profile", devices=2)


def test_profiled_on_this_machine() -> None:
    found = plan(Net(64, 4), example(8, 64), devices=2, stages=2, microbatches=4, schedule="1f1b")
    assert found.cost_source == "profile"
    assert (found.stages, found.replicas, found.microbatches, found.microbatch_size) == (2, 1, 4, 2)
    with pytest.raises(PlanError, match="measures this machine"):
        plan(Net(), example(), cluster=cluster(), cost="profile")


def test_costs_from_a_file(tmp_path) -> None:
    captured = capture(Net(), example())
    from pipepart.planning.sources import Analytic

    costs = Analytic(captured.graph, cluster(), 16).at(16, "gpu")
    write_costs(tmp_path / "costs.json", costs)
    found = plan(captured, cluster=cluster(), cost=tmp_path / "costs.json", stages=2, replicas=1, microbatches=4)
    assert sum(chunk.forward for chunk in found.chunks) == pytest.approx(sum(costs.forward) / 4)


def test_devices_of_two_kinds() -> None:
    mixed = cluster(2, kinds=("fast", "slow"))
    found = plan(Net(), example(), cluster=mixed, stages=2, microbatches=8, schedule="1f1b")
    assert found.chunks[0].parameters > found.chunks[1].parameters


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="devices must be a multiple of replicas"):
        plan(Net(), example(), cluster=cluster(), replicas=3)
    with pytest.raises(PlanError, match="cannot be split into 64 micro-batches"):
        plan(Net(), example(), cluster=cluster(), microbatches=64)
    with pytest.raises(PlanError, match="example batch"):
        plan(Net())


def test_links_and_reductions_of_a_layout() -> None:
    two = Cluster(
        "two",
        cluster().kinds,
        {"near": LinkKind("near", 1e10, 1e-6), "far": LinkKind("far", 1e9, 1e-5)},
        (Node(("gpu", "gpu"), "near"), Node(("gpu", "gpu"), "near")),
        "far",
    )
    pipelines = Layout.on(two, 2, 2)  # each replica inside a node, replicas across the network
    assert pipelines.link(0, 1).bandwidth == 1e10
    assert pipelines.reduce_seconds(0, 1e9) == pytest.approx(2 * (1e-5 + 0.5))
    across = Layout.on(two, 4, 1)
    assert [across.link(a, a + 1).bandwidth for a in range(3)] == [1e10, 1e9, 1e10]
    assert across.reduce_seconds(0, 1e9) == 0.0


def test_batches_of_other_sizes() -> None:
    x, y = torch.arange(6).view(3, 2), torch.tensor([1.0, 2.0])
    cut, kept = resized([x, y], 2)
    assert cut.tolist() == [[0, 1], [2, 3]]
    assert kept is y
    assert resized([x, 7], 4)[0].shape == (4, 2)
    costs = plan_costs()
    half = costs.scaled(0.5)
    assert half.parameter_bytes == costs.parameter_bytes
    assert sum(half.forward) == pytest.approx(sum(costs.forward) / 2)


def plan_costs():
    from pipepart.planning.sources import Analytic

    captured = capture(Net(), example())
    return Analytic(captured.graph, cluster(), 16).at(16, "gpu")


def test_a_backward_in_two_halves_has_its_price() -> None:
    """What the halves take more is in the step of schedules that split, and in no other."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    graph = capture(Model(), (torch.randn(8, 4),)).graph
    linear = [op.kind == "module" for op in graph.ops]
    ones = tuple(float(busy) for busy in linear)
    none = (0,) * len(graph)
    plain = OpCosts(tuple(op.name for op in graph.ops), ones, ones, ones, none, none, none, "sample")
    dear = dataclasses.replace(plain, split_extra=tuple(0.5 * one for one in ones))

    sizes = {name: ParameterSize(16, 64) for name, _ in layers.named_parameters(prefix="layers")}

    def step(costs: OpCosts, schedule: str) -> float:
        fixed = {"schedule": schedule, "slack": 0, "split_at": ("layers.2",)}
        return planned(graph, costs, 1, sizes, stages=2, microbatches=8, **fixed).step_time

    assert step(dear, "1f1b") == step(plain, "1f1b")
    assert step(dear, "zb_h1") >= step(plain, "zb_h1") + 8 * 2 * 0.5  # 8 micro-batches of two layers on a stage
