"""LightningModules as users write them: nothing here knows of pipelines."""

from __future__ import annotations

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from support.models import MODELS, build

__all__ = ["Module", "loader"]


class Module(L.LightningModule):
    """One of the small models with AdamW, decay groups, a schedule of the learning rate, and logging."""

    def __init__(self, name: str = "gpt", seed: int = 0) -> None:
        super().__init__()
        self.model = build(name, seed)
        self.seen: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.model(x, y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(*batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.model(*batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self):
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        # The eps keeps gradients that are 0 but for rounding (biases of keys) from being blown up to full steps.
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(name: str, samples: int, batch_size: int, seed: int = 5, shuffle: bool = False) -> DataLoader:
    torch.manual_seed(seed)
    return DataLoader(TensorDataset(*MODELS[name].batch(samples)), batch_size=batch_size, shuffle=shuffle)
