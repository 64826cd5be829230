"""The loss scaler: the host follows the scale without reading it, and stages and replicas decide together."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.lightning.loss_scaling import LossScaling, match_device
from pipepart.lightning.run_patches import RunPatches

CPU = torch.device("cpu")


def _plugin(**options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0, **options))


@pytest.mark.parametrize("fused", [False, True])
def test_the_host_follows_the_scale(fused: bool) -> None:
    plugin, patches = _plugin(growth_interval=3), RunPatches()
    scaler: Any = plugin.scaler
    scaling = LossScaling(plugin, None, CPU, patches)
    own = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([own], lr=0.1, fused=fused)
    factors, copies = [], set()
    for step in range(20):
        assert scaling.factor() == scaler.get_scale()
        assert scaling.factor() == scaler.get_scale(), "a second batch of the same window"
        factors.append(scaling.factor())
        copies.add(id(scaling._host))
        own.grad = torch.full((3,), float("inf") if step in (2, 9, 10) else scaler.get_scale())
        before = own.detach().clone()
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, own) == (step in (2, 9, 10))
    assert len(set(factors)) == 3 and len(copies) == 1, "the scale has changed, and was read once"
    # Whatever else writes to the scale is seen.
    scaler.update(16.0)
    assert scaling.factor() == 16.0
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
    assert scaling.factor() == 8.0
    patches.undo()
    assert not {"update", "unscale_", "_check_inf_per_device"} & set(vars(scaler))


def test_without_a_scaler_the_factor_is_one() -> None:
    assert LossScaling(MixedPrecision("bf16-mixed", "cpu"), None, CPU, RunPatches()).factor() == 1.0


def test_mixed_precision_is_that_of_the_device_of_the_run() -> None:
    """Lightning gives accelerators of other libraries the plugin of one of its own."""
    other = torch.device("xpu", 0)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=7))
    match_device(plugin, other)
    scaler: Any = plugin.scaler
    assert plugin.device == scaler._device == "xpu" and scaler.is_enabled()
    assert scaler.get_scale() == 64.0 and scaler.get_growth_interval() == 7
    same = MixedPrecision("bf16-mixed", "cpu")
    match_device(same, torch.device("cpu"))
    assert same.device == "cpu" and same.scaler is None
    match_device(same, other)
    assert same.device == "xpu" and same.scaler is None


class Overflow(L.LightningModule):
    """In the second step of the optimizer gradients of the last stage, and of no other, are infinite.

    In its first batch that of one replica is. The reduction of the second batch brings it to the other replicas.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.fused = nn.Linear(6, 8), nn.Linear(8, 1), fused
        self.seen: list[Any] = []

    def training_step(self, batch, batch_idx):
        return self.second(torch.relu(self.first(batch))).pow(2).mean()

    def on_after_backward(self):
        if self.trainer.global_step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            self.second.weight.grad[0, 0] = float("inf")

    def on_train_batch_end(self, *args):
        held = {name: p.detach().clone() for name, p in self.named_parameters() if not p.is_meta}
        self.seen.append((held, self.trainer.precision_plugin.scaler.get_scale()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, fused=self.fused)


def _fit(fused: bool, sync: str) -> list[Any]:
    module = Overflow(fused)
    strategy = PipelineStrategy(stages=2, replicas=2, microbatches=2, schedule="1f1b", split_at=["second"], sync=sync)
    options: dict[str, Any] = {**QUIET, "plugins": [_plugin()], "max_epochs": 1, "accumulate_grad_batches": 2}
    if not fused:
        options["gradient_clip_val"] = 1.0  # Lightning refuses it for fused optimizers
    trainer = L.Trainer(strategy=strategy, devices=4, **options)
    trainer.fit(module, DataLoader(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), 4))
    return module.seen


@pytest.mark.parametrize(
    ("fused", "sync"), [(False, "mean"), (True, "mean"), (False, "sharded"), (False, "fsdp"), (True, "master")]
)
@pytest.mark.slow
def test_one_decision_for_stages_and_replicas(fused: bool, sync: str) -> None:
    answers = run_ranks(4, _fit, fused, sync)
    for rank, seen in enumerate(answers):
        assert [scale for _, scale in seen] == [64.0, 64.0, 64.0, 32.0, 32.0, 32.0], rank
        steps = [held for held, _ in seen]
        for name, value in steps[1].items():
            assert torch.equal(value, steps[3][name]), "the step with the overflow changes nothing on any rank"
            assert not torch.equal(value, steps[5][name])
        for held, other in zip(steps, [held for held, _ in answers[rank % 2]]):
            assert all(torch.equal(held[name], other[name]) for name in held), "replicas are equal"
