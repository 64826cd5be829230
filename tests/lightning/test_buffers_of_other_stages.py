"""Buffers that another stage updates: right in hooks and inside `whole_parameters()`, on every rank and after each batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipepart import PipelineStrategy


class Reading(L.LightningModule):
    """Layers with running statistics on both stages, read by a hook after each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)]
        self.layers = nn.Sequential(*blocks, nn.Linear(6, 2)).double()
        self.seen: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        whole = getattr(self.trainer.strategy, "whole_parameters", nullcontext)
        with whole() if batch_idx % 2 else nullcontext():
            self.seen.append({name: buffer.clone() for name, buffer in self.named_buffers()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(devices: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(24, 6).double(), torch.randn(24, 2).double()), batch_size=8)
    module = Reading()
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=2, microbatches=1) if devices > 1 else "auto",
        devices=devices, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return [*module.seen, {name: buffer.clone() for name, buffer in module.named_buffers()}]


def test_running_statistics_in_hooks_and_after_the_run() -> None:
    expected = _fit(1)
    for answer in run_ranks(2, _fit, 2):
        assert len(answer) == len(expected) == 7
        for got, wanted in zip(answer, expected):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
