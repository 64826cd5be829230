"""The smallest recipe: a few linear layers that separate two spirals. Copy it to start your own.

pipepart train recipe=mlp
pipepart train recipe=mlp data.path=points.csv model.depth=12 strategy.stages=4
"""

from __future__ import annotations

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recipes.optimizers import Make, optimized

__all__ = ["MLPModule", "PointData", "spirals"]

Batch = tuple[torch.Tensor, torch.Tensor]


def spirals(samples: int, seed: int = 0) -> Batch:
    """Points on two arms of a spiral, and the arm of each."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.arange(samples) % 2
    way = torch.rand(samples, generator=generator).sqrt() * 2 * torch.pi
    angle = way + arm * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * way[:, None] / 6
    return points + 0.02 * torch.randn(points.shape, generator=generator), arm


class PointData(L.LightningDataModule):
    """Two spirals, or the rows of your own CSV file: numbers, and the class (0 or 1) in the last column."""

    def __init__(self, batch_size: int = 64, samples: int = 2048, path: str | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        if path is None:
            self.train, self.val = TensorDataset(*spirals(samples)), TensorDataset(*spirals(samples // 4, seed=1))
        else:
            rows = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2))
            points, classes, cut = rows[:, :2], rows[:, -1].long(), len(rows) * 4 // 5
            self.train = TensorDataset(points[:cut], classes[:cut])
            self.val = TensorDataset(points[cut:], classes[cut:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class MLPModule(L.LightningModule):
    """Linear layers with a nonlinearity between them."""

    def __init__(self, optimizer: Make, scheduler: Make | None = None, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2, width), nn.GELU()]
        for _ in range(depth - 2):
            layers += [nn.Linear(width, width), nn.GELU()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 2))
        self.optimizer, self.scheduler = optimizer, scheduler

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        points, classes = batch
        loss = F.cross_entropy(self.net(points), classes)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        points, classes = batch
        scores = self.net(points)
        self.log("val/loss", F.cross_entropy(scores, classes), prog_bar=True, sync_dist=True)
        self.log("val/accuracy", (scores.argmax(1) == classes).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimized(self.parameters(), self.optimizer, self.scheduler)
