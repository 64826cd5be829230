"""A program as a user of `pytorch_lightning` writes it: nothing here knows of the package `lightning`, or of pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.example_input_array = torch.zeros(2, 8, dtype=torch.float64)
        self.hooks: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def on_train_epoch_end(self) -> None:
        self.hooks.append(f"epoch {self.current_epoch}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Data(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        drawn = torch.Generator().manual_seed(2)
        x = torch.randn(24, 8, generator=drawn, dtype=torch.float64)
        self.set = TensorDataset(x, torch.randint(0, 4, (24,), generator=drawn))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.set, batch_size=8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Seen(pl.Callback):
    """A callback of the user."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ended: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended.append(f"{trainer.current_epoch} epochs, {trainer.global_step} steps")


def run(folder: str, epochs: int = 3, resume: str | None = None, own: Any = (), **options: Any) -> dict[str, Any]:
    """Fit, validate, test and predict, and what the user sees of it."""
    pl.seed_everything(4, verbose=False)
    module, seen = Classifier().double(), Seen()
    callbacks = [
        seen,
        ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1, filename="{epoch}"),
        EarlyStopping("val_loss", patience=5),
        LearningRateMonitor(),
        *own,
    ]
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=CSVLogger(folder), callbacks=callbacks, enable_progress_bar=False,
        gradient_clip_val=0.5, use_distributed_sampler=False, log_every_n_steps=1, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=Data(), ckpt_path=resume)
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    found: dict[str, Any] = {"losses": seen.losses, "ended": seen.ended, "hooks": module.hooks, "logged": logged}
    found["best"] = Path(trainer.checkpoint_callback.best_model_path).name
    found["validate"] = trainer.validate(module, datamodule=Data(), verbose=False)
    found["test"] = trainer.test(module, datamodule=Data(), verbose=False)
    found["predict"] = torch.cat(trainer.predict(module, datamodule=Data()))
    found["state"] = {name: value.clone() for name, value in module.state_dict().items()}
    return found
