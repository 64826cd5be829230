"""Plans that are made with the first batch, in one process: what set-up and hooks have done before stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from realistic import Boring, build
from watching import QUIET

from pipepart import PipelineStrategy


def _trainer(ours: bool, **options: Any) -> L.Trainer:
    return L.Trainer(strategy=PipelineStrategy(stages=1) if ours else "auto", devices=1, **{**QUIET, **options})


def _made(kind: type, *args: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args).double()


class Modes(Boring):
    """A hook sets the mode of a layer for the evaluation, and the calls of `eval` and `train` are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.doubles = Doubles()
        self.calls: list[str] = []

    def forward(self, x):
        return self.doubles(super().forward(x))

    def on_validation_start(self):
        self.doubles.train()

    def train(self, mode=True):
        if hasattr(self, "calls"):
            self.calls.append(str(mode))
        return super().train(mode)


class Doubles(torch.nn.Module):
    def forward(self, x):
        return 2.0 * x if self.training else x


def test_modes_of_an_evaluation_are_those_that_hooks_have_set() -> None:
    _, data, _ = build("boring")
    found = []
    for ours in (False, True):
        module, trainer = _made(Modes), _trainer(ours, limit_val_batches=2)
        results = trainer.validate(module, data, verbose=False)
        assert not ours or trainer.strategy.plan.stages == 1, "it is recorded"
        found.append((results[0]["x"], module.calls))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    assert found[1][1] == found[0][1]


class ByHand(Boring):
    """Optimizes by itself with two optimizers, and counts the calls that make them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.made = 0

    def configure_optimizers(self):
        self.made += 1
        return [torch.optim.SGD(part.parameters(), lr=0.05 * self.made) for part in (self.layer[0], self.layer[2:])]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
            optimizer.step()


def test_optimizers_that_exist_are_not_made_again() -> None:
    _, data, _ = build("boring")
    modules = [_made(ByHand), _made(ByHand)]
    for module, ours in zip(modules, (False, True)):
        trainer = _trainer(ours, max_steps=6, limit_val_batches=0)
        trainer.fit(module, data)
        assert not ours or trainer.strategy.plans_training, "it is recorded"
        assert module.made == 1
        trainer.fit_loop.epoch_loop.max_steps = 8
        trainer.fit(module, data)
        assert module.made == 2
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kept", [0, 1])
def test_optimizers_without_a_state_in_the_checkpoint_begin_anew(kept: int, tmp_path: Path) -> None:
    _, data, _ = build("boring")
    trainer = _trainer(True, max_steps=4, limit_val_batches=0)
    trainer.fit(_made(ByHand), data)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    checkpoint["optimizer_states"] = checkpoint["optimizer_states"][:kept]
    torch.save(checkpoint, tmp_path / "some.ckpt")
    modules = [_made(ByHand), _made(ByHand)]
    for module, ours in zip(modules, (False, True)):
        _trainer(ours, max_steps=8, limit_val_batches=0).fit(module, data, ckpt_path=tmp_path / "some.ckpt")
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-9, atol=1e-12)
