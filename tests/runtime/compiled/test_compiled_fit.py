"""Compiled chunks in a Trainer: precisions, evaluations, clipping and several optimizer steps equal a run without them."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipepart import PipelineStrategy
from pipepart.machine import usable
from pipepart.runtime.compiled import NotCompiled

EAGER = {"backend": "aot_eager", "fullgraph": True}


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 3))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("right", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(compile: Any, precision: Any) -> tuple[dict[str, Any], dict[str, float]]:
    torch.set_num_threads(1)
    x = torch.randn(22, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x.double() if precision == "64-true" else x, x.argmax(1) % 3), batch_size=8)
    L.seed_everything(4, verbose=False)
    module = Net()
    strategy = PipelineStrategy(stages=1, microbatches=2, schedule="gpipe", compile=compile)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, precision=precision, max_epochs=2, gradient_clip_val=0.5,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCompiled)
        trainer.fit(module, loader, loader)
    return module.state_dict(), {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_equal_to_a_run_without_the_compiler(precision: Any) -> None:
    if precision == "bf16-mixed" and not usable("bfloat16"):
        pytest.skip("this processor has no products of this dtype")
    close: dict[str, float] = {"rtol": 1e-9, "atol": 1e-10} if precision == "64-true" else {"rtol": 0.05, "atol": 0.02}
    expected, logged = fit(False, precision)
    found, own = fit(EAGER, precision)
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(own, logged, **close)
