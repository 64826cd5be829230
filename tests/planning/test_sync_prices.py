"""Prices of the modes of `sync`: by hand for one stage, and what links and memory do to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipepart.cost.cluster import Cluster, DeviceKind, LinkKind, Node
from pipepart.errors import PlanError
from pipepart.planning import Plan, PlanOptions, plan
from pipepart.planning.entry import Target, layout_of
from pipepart.planning.sync_choice import chosen_sync
from pipepart.planning.sync_memory import gather_of
from pipepart.planning.sync_mode import SyncMode
from pipepart.planning.sync_prices import SyncPrice, describe_sync, sync_prices

LATENCY = 1e-4


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(depth)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), y)


def _cluster(network: float) -> Cluster:
    """Two nodes of two devices."""
    kind = DeviceKind("gpu", {"float32": 1e9}, 1e10, 1e9, 1.0, 0.0)
    latency = LATENCY if network < 1e9 else 1e-6
    links = {"inside": LinkKind("inside", 1e10, 1e-6), "between": LinkKind("between", network, latency)}
    return Cluster("sample", {"gpu": kind}, links, (Node(("gpu",) * 2, "inside"),) * 2, "between")


def _prices(
    network: float, stages: int = 1, replicas: int = 4, memory_limit: float | None = None
) -> dict[str, SyncPrice]:
    batch = torch.zeros(16, 64), torch.zeros(16, dtype=torch.long)
    cluster = _cluster(network)
    options = {"stages": stages, "replicas": replicas, "cluster": cluster, "batch_size": 64}
    found = plan(Net(), batch, cost="analytic", **options)  # type: ignore[arg-type]
    layout = layout_of(found, PlanOptions(), Target(cluster))
    return {
        price.name.split(",")[0] + ("*" if "inside" in price.name else ""): price
        for price in sync_prices(found, layout)
    }


def test_prices_by_hand() -> None:
    size, network = 4 * 4 * (64 * 64 + 64), 1e6
    found = _prices(network)
    half = 3 * (LATENCY + size / 4 / network)
    assert found["mean"].exchange == pytest.approx(2 * half)
    assert found["sharded"].exchange == pytest.approx(2 * half)
    assert found["local"].exchange == pytest.approx(2 * half / 32)
    assert found["ring"].exchange == pytest.approx(LATENCY + size / network)
    inside, between = 1e-6 + size / 1e10, LATENCY + size / 2 / network
    assert found["mean*"].exchange == pytest.approx(2 * inside + 2 * between)
    alone = found["local"].step - found["local"].exchange
    assert found["mean"].step == pytest.approx(alone + 2 * half)  # with one chunk nothing is left to run beside it
    assert found["ring"].step == pytest.approx(max(alone, found["ring"].exchange))
    states = found["mean"].memory - found["sharded"].memory
    assert states == pytest.approx(2 * size * 3 / 4)
    assert found["diloco"].memory - found["local"].memory == pytest.approx(2 * size)
    assert [name for name, price in found.items() if price.same] == ["mean", "mean*", "sharded", "fsdp", "master"]
    assert found["fsdp"].exchange == pytest.approx(2 * half)  # one chunk: nothing runs before its parameters are needed
    assert found["fsdp"].step == pytest.approx(alone + 2 * half) and found["fsdp"].memory == found["sharded"].memory


def test_a_slow_network_is_for_rounds_and_levels_and_a_fast_one_for_the_mean() -> None:
    slow, fast = _prices(1e6, stages=1), _prices(1e12, stages=1)
    assert slow["local"].step < slow["mean*"].step < slow["mean"].step
    assert fast["mean"].step < 1.5 * fast["local"].step
    assert "mean*" not in _prices(1e6, stages=2, replicas=2)  # one replica on each node
    assert _prices(1e6, stages=4, replicas=1) == {}


def test_the_table_says_what_does_not_fit() -> None:
    prices = list(_prices(1e6).values())
    table = describe_sync(prices, limit=(prices[0].memory + prices[2].memory) / 2)
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "too much" in rows["mean"] and "too much" not in rows["sharded"]
    assert "another" in rows["local, every 32"] and "that of mean" in rows["master"]
    assert describe_sync([]) == ""


BATCH = torch.zeros(16, 64), torch.zeros(16, dtype=torch.long)


def _auto(network: float, depth: int = 4, **options: Any) -> Plan:
    given: dict[str, Any] = {
        "cluster": _cluster(network),
        "stages": 1,
        "replicas": 4,
        "batch_size": 64,
        "sync": "auto",
        **options,
    }
    return plan(Net(depth), BATCH, cost="analytic", **given)


def test_a_choice_that_is_none_is_refused() -> None:
    made = _auto(1e12)
    for sync in ("no json", "[3]", '"local"', '{"mode": "mean", "every": 3}'):
        with pytest.raises(PlanError, match="sync of the plan is"):
            chosen_sync(replace(made, sync=sync))


def test_auto_chooses_by_price_and_memory(tmp_path: Path) -> None:
    assert chosen_sync(_auto(1e12)) == "mean"
    slow = _auto(1e6)
    assert chosen_sync(slow) == {"mode": "mean", "inside": 2}
    assert "inside" in slow.describe()
    slow.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == slow
    room = _auto(1e12, sync="mean").memory[0].total
    short = _auto(1e12, memory_limit=room * 0.75, recompute=False)
    assert chosen_sync(short) == "sharded"
    assert short.memory[0].total < room * 0.75
    several: dict[str, Any] = {"depth": 8, "stages": 2, "replicas": 2, "chunks": 4, "recompute": False}
    several |= {"schedule": "interleaved", "microbatches": 4}
    states = max(memory.total for memory in _auto(1e12, sync="sharded", **several).memory)
    tight = _auto(
        1e12, memory_limit=states - 64 * 64 * 4 * 0.9, **several
    )  # a chunk has one layer; half of two is away
    assert chosen_sync(tight) == "fsdp" and gather_of(SyncMode.of("fsdp"), tight).gather == "microbatch"
    assert gather_of(SyncMode.of("fsdp"), _auto(1e12, sync="fsdp", **several)).gather == "step"
    assert chosen_sync(_auto(1e6, stages=4, replicas=1)) == "mean"
    assert (
        chosen_sync(plan(Net(), (torch.zeros(16, 64), torch.zeros(16, dtype=torch.long)), cluster=_cluster(1e6)))
        == "mean"
    )


def test_a_plan_for_replicas_that_train_alone_has_no_sums_of_gradients_and_room_for_copies() -> None:
    mean, local, diloco, ring, two = (
        _auto(1e6, sync=sync)
        for sync in (
            "mean",
            "local",
            {"mode": "local", "outer": "nesterov"},
            "ring",
            {"inside": "mean", "size": 2, "between": "local"},
        )
    )
    assert mean.chunks[0].reduce == two.chunks[0].reduce > 0
    assert local.chunks[0].reduce == ring.chunks[0].reduce == 0 and local.step_time < mean.step_time
    weights = mean.memory[0].weights
    more = [plan.memory[0].optimizer - mean.memory[0].optimizer for plan in (local, diloco, ring)]
    assert more == [0, 2 * weights, 3 * weights]
