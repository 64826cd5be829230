"""Lightning's callbacks that average weights: equal to one device, each stage averages what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from support.ranks import error_of, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from watching import QUIET

from pipepart import PipelineStrategy


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        )
        self.validated: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x), y))

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.validated.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Saving(cb.Callback):
    """Saves a checkpoint at the end of the second epoch, as a ModelCheckpoint does."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            trainer.save_checkpoint(self.path)


def _own_average(average, current, count):
    return average * 0.7 + current * 0.3


CALLBACKS = {
    "weight averaging": lambda: cb.WeightAveraging(),
    "ema": lambda: cb.EMAWeightAveraging(decay=0.6, update_every_n_steps=2),
    "without buffers": lambda: cb.WeightAveraging(use_buffers=False, avg_fn=_own_average),
    "swa": lambda: cb.StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2),
}


NEWER = pytest.mark.skipif(not hasattr(cb, "WeightAveraging"), reason="WeightAveraging is new in Lightning 2.6")


def _fit(name: str, pipeline: bool, path: str, resume: str | None = None) -> dict[str, Any]:
    torch.manual_seed(1)
    x = torch.randn(24, 6, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8)
    torch.manual_seed(2 + (torch.distributed.get_rank() if pipeline else 0))  # rank 0 has the weights
    module = Net().double()
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=2, microbatches=1, split_at=["net.3"]) if pipeline else "auto",
        devices=2 if pipeline else 1,
        max_epochs=5,
        callbacks=[CALLBACKS[name](), Saving(path)],
        **QUIET,
    )
    trainer.fit(module, data, data, ckpt_path=resume)
    trainer.save_checkpoint(f"{path}.end")
    return {"weights": module.state_dict(), "validated": module.validated, "epoch": trainer.current_epoch}


def _assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            _assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{where}: {text}")
    else:
        assert found == pytest.approx(expected, rel=1e-9), where


def _averages(path: str) -> dict[str, Any]:
    state = torch.load(path, weights_only=False)
    kept = {key: state[key] for key in ("state_dict", "current_model_state", "averaging_state") if key in state}
    for values in state["callbacks"].values():
        if "average_model_state" in values:
            kept["swa"] = {"n": values["n_averaged"], "average": dict(values["average_model_state"])}
    return {key: dict(value) for key, value in kept.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "swa" else NEWER) for name in CALLBACKS])
def test_equal_to_one_device_with_checkpoint_and_resume(name: str, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one.ckpt"), str(tmp_path / "two.ckpt")
    expected = _fit(name, False, one)
    for found in run_ranks(2, _fit, name, True, two):
        _assert_same(found, expected, name)
    for ending in ("", ".end"):
        _assert_same(_averages(two + ending), _averages(one + ending), f"{name}{ending}")
    resumed = _fit(name, False, str(tmp_path / "again.ckpt"), resume=one)
    for found in run_ranks(2, _fit, name, True, str(tmp_path / "more.ckpt"), resume=one):
        _assert_same(found, resumed, f"{name}, resumed")
    plain = _fit(name, False, str(tmp_path / "plain.ckpt"), resume=two)
    _assert_same(plain, resumed, f"{name}, resumed on one device")


def _own_lists(averages, currents, count):
    for average, current in zip(averages, currents):
        average.lerp_(current, 0.5)


def _refused() -> list[str]:
    cases = [
        (cb.WeightAveraging(multi_avg_fn=_own_lists), {}),
        (cb.WeightAveraging(), {"sharded": True}),
        (cb.StochasticWeightAveraging(0.1), {"after": "parts"}),
    ]
    data = DataLoader(TensorDataset(torch.randn(8, 6), torch.randn(8, 1)), batch_size=8)
    return [
        error_of(
            L.Trainer(
                strategy=PipelineStrategy(stages=2, microbatches=1, **options), devices=2, callbacks=[callback], **QUIET
            ).fit,
            Net(),
            data,
        )
        for callback, options in cases
    ]


@NEWER
def test_averages_that_stages_cannot_keep_are_refused() -> None:
    words = ("multi_avg_fn of its own", "sharded checkpoints do not support", "use after='whole'")
    for found in run_ranks(2, _refused):
        for text, expected in zip(found, words):
            assert expected in text
