"""A U-Net that finds shapes in noisy images. The output of each level on the way down also enters the level on the way up.

pipepart train recipe=unet
pipepart train recipe=unet data.path=my_scans data.size=128 model.width=32 model.levels=4 strategy.stages=4
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from recipes.optimizers import Make, optimized

__all__ = ["UNet", "UNetModule"]

Batch = tuple[torch.Tensor, torch.Tensor]


def double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Levels down, the bottom, and levels up, with a skip on every level."""

    def __init__(self, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(double(i, o) for i, o in zip([3, *widths[:-2]], widths[:-1]))
        self.bottom = double(widths[-2], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, block, skip in zip(self.grow, self.up, reversed(skips)):
            x = block(torch.cat([grow(x), skip], dim=1))
        return self.head(x)[:, 0]


class UNetModule(L.LightningModule):
    def __init__(self, optimizer: Make, scheduler: Make | None = None, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        self.model = UNet(width, levels)
        self.optimizer, self.scheduler = optimizer, scheduler

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        pictures, masks = batch
        loss = F.binary_cross_entropy_with_logits(self.model(pictures), masks)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pictures, masks = batch
        scores = self.model(pictures)
        found = (scores > 0).float()
        overlap = (found * masks).sum() / ((found + masks) > 0).float().sum()
        self.log("val/loss", F.binary_cross_entropy_with_logits(scores, masks), prog_bar=True, sync_dist=True)
        self.log("val/overlap", overlap, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimized(self.parameters(), self.optimizer, self.scheduler)
