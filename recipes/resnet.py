"""A residual network with batch norm that classifies images.

pipepart train recipe=resnet
pipepart train recipe=resnet data.path=my_pictures data.classes=10 "model.blocks=[3,4,6,3]" model.width=64
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from recipes.optimizers import Make, optimized

__all__ = ["ResNet", "ResNetModule"]

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        same = stride == 1 and inside == outside
        self.around = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.around(x))


class ResNet(nn.Module):
    """Groups of blocks; each group but the first halves the image and doubles the channels."""

    def __init__(self, classes: int, width: int = 16, blocks: Sequence[int] = (1, 1, 1)) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        layers: list[nn.Module] = []
        inside = width
        for group, count in enumerate(blocks):
            for index in range(count):
                outside = width * 2**group
                layers.append(Block(inside, outside, stride=2 if group and not index else 1))
                inside = outside
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inside, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(pictures)).mean(dim=(2, 3)))


class ResNetModule(L.LightningModule):
    def __init__(
        self,
        optimizer: Make,
        scheduler: Make | None = None,
        classes: int = 4,
        width: int = 16,
        blocks: Sequence[int] = (1, 1, 1),
    ) -> None:
        super().__init__()
        self.model = ResNet(classes, width, blocks)
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
        return optimized(self.parameters(), self.optimizer, self.scheduler)
