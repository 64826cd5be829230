"""Hooks that use parameters of other stages: equal to one device, or refused by name; stages never part in silence."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.errors import ConfigError

SLOW = partial(pytest.param, marks=pytest.mark.slow)


def _rows(width: int = 6, count: int = 12, dtype: torch.dtype = torch.float64) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader([torch.randn(width, generator=generator, dtype=dtype) for _ in range(count)], batch_size=6)


# ---- BYOL: a target network that follows the online network


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)


class Byol(L.LightningModule):
    """The momentum update as it is written everywhere, in a hook."""

    def __init__(self, form: str, whole: bool, aligned: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.online, self.target, self.head = Two(), Two(), nn.Linear(6, 6)
        self.target.requires_grad_(False)
        self.form, self.whole, self.aligned = form, whole, aligned
        self.held = list(zip(self.target.parameters(), self.online.parameters()))  # before the model is cut
        self.double()

    def training_step(self, batch, batch_idx):
        if self.aligned:  # both networks walk side by side
            h, g = torch.tanh(self.online.first(batch)), torch.tanh(self.target.first(batch))
            goal, prediction = self.target.second(g), self.online.second(h)
        else:
            goal = self.target.second(torch.tanh(self.target.first(batch)))
            prediction = self.online.second(torch.tanh(self.online.first(batch)))
        return F.mse_loss(self.head(prediction), goal)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with self.trainer.strategy.whole_parameters() if self.whole else contextlib.nullcontext(), torch.no_grad():
            pairs = self.held if self.form == "held" else zip(self.target.parameters(), self.online.parameters())
            for target, online in pairs:
                if self.form == "data":
                    target.data = 0.9 * target.data + 0.1 * online.data
                else:
                    target.mul_(0.9).add_(online, alpha=0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def _byol(form: str, pipeline: bool, whole: bool, aligned: bool) -> Any:
    module = Byol(form, whole and pipeline, aligned)
    strategy: Any = "auto"
    if pipeline:
        split = "target.second" if aligned else "online.first"
        together = [["online.second", "target.second"], ["online.first", "target.first"]] if aligned else []
        strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b", split_at=[split], keep_together=together)
    trainer = L.Trainer(strategy=strategy, devices=2 if pipeline else 1, max_epochs=2, **QUIET)
    trainer.fit(module, _rows())
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["in place", "data", "held"])
def test_momentum_update_over_stages_equals_one_device(form: str) -> None:
    """The hook works as it is written: what it touches is gathered."""
    _same(run_ranks(2, _byol, form, True, False, False), _byol(form, False, False, False))


@pytest.mark.parametrize(("form", "aligned"), [SLOW("in place", False), ("data", False), SLOW("held", True)])
def test_momentum_update_with_whole_parameters_equals_one_device(form: str, aligned: bool) -> None:
    _same(run_ranks(2, _byol, form, True, True, aligned), _byol(form, False, False, aligned))


@pytest.mark.parametrize("form", ["in place", SLOW("data"), SLOW("held")])
def test_momentum_update_within_stages_equals_one_device(form: str) -> None:
    """Each target is on the stage of its online network, so the hook works as it is written."""
    _same(run_ranks(2, _byol, form, True, False, True), _byol(form, False, False, True))


def _same(answers: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    for answer in answers:  # `state_dict()` of the module itself, on every rank
        assert list(answer) == list(expected)
        for key, value in expected.items():
            assert torch.allclose(answer[key], value, rtol=1e-9, atol=1e-12), key


# ---- a loss scaler and optimizers that unscale gradients themselves


class Overflow(L.LightningModule):
    """In the second batch a gradient of the second stage, and of no other, is infinite."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.optimizer = nn.Linear(6, 8), nn.Linear(8, 1), optimizer

    def training_step(self, batch, batch_idx):
        return self.second(torch.relu(self.first(batch))).pow(2).mean()

    def on_after_backward(self):
        if self.trainer.fit_loop.epoch_loop.batch_idx == 1 and not self.second.weight.is_meta:
            self.second.weight.grad[0, 0] = float("inf")

    def configure_optimizers(self):
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
            "plain": lambda p: torch.optim.SGD(p, lr=0.05),
            "asks": Asks,
        }
        return kinds[self.optimizer](self.parameters())


class Asks(torch.optim.SGD):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None, *, grad_scaler=None):
        return super().step(closure)


def _scaled(optimizer: str, pipeline: bool) -> Any:
    module = Overflow(optimizer)
    seen: list[Any] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            held = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
            seen.append((held, trainer.precision_plugin.scaler.get_scale()))

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b", split_at=["second"]) if pipeline else "auto"
    options: dict[str, Any] = {**QUIET, "plugins": [plugin], "callbacks": [Watch()]}
    trainer = L.Trainer(strategy=strategy, devices=2 if pipeline else 1, max_epochs=1, **options)
    trainer.fit(module, _rows(count=24, dtype=torch.float32))
    return seen


@pytest.mark.parametrize("optimizer", ["adamw", SLOW("sgd"), SLOW("plain")])
def test_one_decision_of_the_scaler_for_all_stages(optimizer: str) -> None:
    expected, (first, second) = _scaled(optimizer, False), run_ranks(2, _scaled, optimizer, True)
    assert [scale for _, scale in expected] == [64.0, 32.0, 32.0, 32.0]
    for (wanted, scale), (one, one_scale), (two, two_scale) in zip(expected, first, second):
        assert one_scale == two_scale == scale
        assert {*one, *two} == set(wanted) and len(one) == len(two) == 2
        for name, value in {**one, **two}.items():
            assert torch.allclose(value, wanted[name], rtol=1e-2, atol=1e-3), name  # products are in float16
    for seen in (first, second):  # the step with the overflow has changed nothing on either stage, the others have
        same = [all(torch.equal(a[0][k], b[0][k]) for k in a[0]) for a, b in pairwise(seen)]
        assert same == [True, False, False]


def _asks() -> str:
    with pytest.raises(ConfigError) as caught:
        _scaled("asks", True)
    return str(caught.value)


def test_an_optimizer_that_asks_the_scaler_itself_is_refused() -> None:
    assert all("Asks.step takes grad_scaler" in text for text in run_ranks(2, _asks))
