"""A BYOL as its users write it: two views of a batch, a predictor, and a target network that a hook moves after each step."""

from __future__ import annotations

import copy
import os
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["fit"]

_BATCH, _STEPS, _TAU = 12, 10, 0.9


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, width))


class Byol(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Sequential(_mlp(8), _mlp(8))
        self.projector, self.predictor = _mlp(8), _mlp(8)
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.target_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.double()

    def _loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        prediction = self.predictor(self.projector(self.encoder(one)))
        with torch.no_grad():
            goal = self.target_projector(self.target_encoder(other))
        return 2 - 2 * F.cosine_similarity(prediction, goal, dim=-1).mean()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        one, other = batch
        loss = self._loss(one, other) + self._loss(other, one)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        pairs = [(self.encoder, self.target_encoder), (self.projector, self.target_projector)]
        for online, target in pairs:
            for p, q in zip(online.parameters(), target.parameters()):
                q.data = _TAU * q.data + (1 - _TAU) * p.data

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(stages: int, replicas: int) -> dict[str, torch.Tensor]:
    """Train ten steps; returns the state. Each replica has its share of each batch. One device: no strategy of ours."""
    torch.manual_seed(4)
    views = torch.randn(2, _BATCH * _STEPS, 8, dtype=torch.float64)
    replica = int(os.environ["RANK"]) // stages if stages else 0
    data = DataLoader(TensorDataset(*views[:, replica::replicas]), batch_size=_BATCH // replicas)
    strategy: Any = "auto"
    if stages:
        from pipepart import PipelineStrategy

        strategy = PipelineStrategy(stages=stages, microbatches=2, schedule="1f1b")
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=max(1, stages) * replicas, max_epochs=1, logger=False,
        use_distributed_sampler=False,  # Lightning's shuffles
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Byol()
    trainer.fit(module, data)
    assert trainer.global_step == _STEPS
    return {key: value.clone() for key, value in module.state_dict().items()}
