"""A vision transformer that classifies images.

pipepart train recipe=vit
pipepart train recipe=vit data.path=my_pictures data.classes=10 data.size=64 model.patch=8
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from recipes.optimizers import Make, decayed, optimized

__all__ = ["ViT", "ViTModule"]

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Attention between all patches, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(
        self, size: int, classes: int, patch: int = 4, width: int = 96, depth: int = 6, heads: int = 4
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"data.size={size} is not a multiple of model.patch={patch}")
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))


class ViTModule(L.LightningModule):
    def __init__(
        self,
        optimizer: Make,
        scheduler: Make | None = None,
        size: int = 32,
        classes: int = 4,
        patch: int = 4,
        width: int = 96,
        depth: int = 6,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.model = ViT(size, classes, patch, width, depth, heads)
        self.optimizer, self.scheduler = optimizer, scheduler

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        pictures, classes = batch
        loss = F.cross_entropy(self.model(pictures), classes)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pictures, classes = batch
        scores = self.model(pictures)
        self.log("val/loss", F.cross_entropy(scores, classes), prog_bar=True, sync_dist=True)
        self.log("val/accuracy", (scores.argmax(1) == classes).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimized(decayed(self), self.optimizer, self.scheduler)
