"""LightningModules as people write them, with data: nothing here knows of pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.models import GPT, UNet
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

__all__ = ["MICRO_STATISTICS", "MODULES", "build"]


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class Rows(Dataset):
    """Samples of any nesting, made before: the same in every process."""

    def __init__(self, make: Callable[[], Any], count: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.rows = [tree_map(lambda x: x.to(dtype) if _is_floating(x) else x, make()) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Base(L.LightningModule):
    lr = 0.05

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


class Boring(Base):
    """Lightning's own test model, with layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.layer(x)

    def loss(self, prediction):
        return F.mse_loss(prediction, torch.ones_like(prediction))

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(self(batch))}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(self(batch))
        self.log("x", loss)
        return {"x": loss}

    def test_step(self, batch, batch_idx):
        loss = self.loss(self(batch))
        self.log("y", loss)
        return {"y": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    @staticmethod
    def sample():
        return torch.randn(32)


def _labelled():
    x = torch.randn(12)
    return x, (x[:3].argmax() + (x.sum() > 0)) % 4


class Classifier(Base):
    """torchmetrics in every way: value, object, collection, epoch-end compute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))
        self.train_accuracy = MulticlassAccuracy(4)
        self.val_metrics = MetricCollection(
            {"acc": MulticlassAccuracy(4, average="micro"), "f1": MulticlassF1Score(4)}, prefix="val_"
        )
        self.val_loss = MeanMetric()
        self.by_hand = MulticlassAccuracy(4, average="micro")
        self.kept: list[torch.Tensor] = []
        self.epoch_values: list[float] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        accuracy = self.train_accuracy(logits, y)
        self.log("train_accuracy_step", accuracy)
        self.log("train_error", 1 - accuracy, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=x.size(0))
        return {"loss": loss, "accuracy": accuracy}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.val_metrics.update(logits, y)
        self.log_dict(self.val_metrics)
        self.val_loss(F.cross_entropy(logits, y), weight=len(x))
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.by_hand.update(logits.argmax(1), y)
        self.kept.append(logits.argmax(1))
        self.log("correct", (logits.argmax(1) == y).sum().float(), reduce_fx="sum")
        self.log("largest", logits.max(), reduce_fx="max")

    def on_validation_epoch_end(self):
        self.epoch_values += [float(self.by_hand.compute()), float(torch.cat(self.kept).float().mean())]
        self.by_hand.reset()
        self.kept.clear()
        self.log("by_hand", self.epoch_values[-2])

    sample = staticmethod(_labelled)


class LanguageModel(Base):
    """Tied weights, decay groups, a cosine schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch, batch_idx):
        loss = self.model(*batch)
        self.log("loss", loss)
        self.log("bits", loss * 1.4427, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(*batch), sync_dist=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @staticmethod
    def sample():
        x = torch.randint(0, 32, (12,))
        return x, x.roll(-1)


class Segmentation(Base):
    """Skips, batch statistics; batches are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()

    def training_step(self, batch, batch_idx):
        loss = self.net(batch["image"], batch["mask"])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["image"]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch["image"], batch["mask"]))

    @staticmethod
    def sample():
        return {"image": torch.randn(3, 8, 8), "mask": torch.rand(1, 8, 8).round()}


class Autoencoder(Base):
    """A forward of its own, plateau schedule on the validation loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(
            nn.Linear(8, 64), nn.GELU(), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 1, 2, stride=2)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch):
        loss = F.mse_loss(self(batch), batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", F.mse_loss(self(batch), batch))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"code": self.encoder(batch), "image": self(batch)}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    @staticmethod
    def sample():
        return torch.rand(1, 8, 8)


class Pretrained(Base):
    """A Hugging Face model, called with the whole dict."""

    lr = 0.02

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("loss", output.loss)
        return output.loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log_dict(
            {"val_loss": output.loss, "val_accuracy": (output.logits.argmax(-1) == batch["labels"]).float().mean()}
        )

    @staticmethod
    def sample():
        mask = torch.ones(10, dtype=torch.long)
        mask[int(torch.randint(6, 11, ())) :] = 0
        return {"input_ids": torch.randint(0, 40, (10,)), "attention_mask": mask, "labels": torch.randint(0, 3, ())}


class Translation(Base):
    """Encoder and decoder with attention over padded sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, 16, padding_idx=0), nn.Embedding(24, 16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True), 2)
        self.head = nn.Linear(16, 24)

    def loss(self, batch):
        source, target = batch
        padding = source == 0
        memory = self.encoder(self.source(source), src_key_padding_mask=padding)
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1) - 1, device=target.device)
        out = self.decoder(self.target(target[:, :-1]), memory, tgt_mask=causal, memory_key_padding_mask=padding)
        return F.cross_entropy(self.head(out).transpose(1, 2), target[:, 1:])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    @staticmethod
    def sample():
        source = torch.randint(1, 20, (7,))
        source[int(torch.randint(4, 8, ())) :] = 0
        return source, torch.randint(1, 24, (6,))


class Recurrent(Base):
    """An LSTM over sequences, last state to a class; the loss is returned with more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(16, 12),
            nn.LSTM(12, 16, num_layers=2, batch_first=True),
            nn.Linear(16, 4),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        _, (h, _) = self.lstm(self.embed(x))
        logits = self.head(h[-1])
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["logits"].shape == (len(batch[0]), 4)
        self.log("confidence", outputs["logits"].softmax(-1).max(-1).values.mean())

    @staticmethod
    def sample():
        return torch.randint(0, 16, (9,)), torch.randint(0, 4, ())


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return F.relu(x + self.body(x), inplace=True)


class Vision(Base):
    """A ResNet with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.Sequential(_Residual(6), nn.MaxPool2d(2), _Residual(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    @staticmethod
    def sample():
        return torch.randn(3, 8, 8), torch.randint(0, 4, ())


class ManyLosses(Base):
    """Two heads, `log_dict`, a custom clipping, an optimizer step with warm-up, an attribute that keeps the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 20), nn.SiLU(), nn.Linear(20, 20), nn.SiLU())
        self.mean, self.classes = nn.Linear(20, 1), nn.Linear(20, 4)

    def losses(self, batch):
        x, y = batch
        h = self.body(x)
        return {
            "class": F.cross_entropy(self.classes(h), y),
            "value": F.smooth_l1_loss(self.mean(h)[:, 0], x.sum(1)),
            "size": h.pow(2).mean(),
        }

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        total = losses["class"] + 0.5 * losses["value"] + 0.01 * losses["size"]
        self.log_dict(
            {f"train/{name}": value for name, value in losses.items()}, on_step=True, on_epoch=True, prog_bar=True
        )
        self.log("train/total", total)
        self.last = total.detach()
        return total

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("train/last", self.last)

    def validation_step(self, batch, batch_idx):
        self.log_dict({f"val/{name}": value for name, value in self.losses(batch).items()})

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.trainer.global_step > 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=optimizer_closure)

    sample = staticmethod(_labelled)


class WarmUp(Base):
    """The weight of one term follows `global_step`, that of another the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.to_mean, self.to_spread = nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        h = torch.tanh(self.encoder(x))
        mean, spread = self.to_mean(h), self.to_spread(h)
        beta = min(1.0, self.global_step / 6)
        divergence = 0.5 * (mean.pow(2) + spread.exp() - 1 - spread).sum(1).mean()
        loss = F.mse_loss(self.decoder(mean), x) + beta * divergence + 0.1 * self.current_epoch * mean.pow(2).mean()
        self.log("beta", beta)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    sample = staticmethod(_labelled)


class FrozenBackbone(Base):
    """The lower part is not trained; its batch norm stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.backbone.requires_grad_(False)
        self.backbone.eval()

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            features = self.backbone(x)
        loss = F.cross_entropy(self.head(features), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.head(self.backbone(x)), y))

    sample = staticmethod(_labelled)


MODULES: dict[str, type[Base]] = {
    "boring": Boring,
    "classifier": Classifier,
    "gpt": LanguageModel,
    "unet": Segmentation,
    "autoencoder": Autoencoder,
    "hugging_face": Pretrained,
    "seq2seq": Translation,
    "lstm": Recurrent,
    "resnet": Vision,
    "many_losses": ManyLosses,
    "warm_up": WarmUp,
    "frozen": FrozenBackbone,
}
MICRO_STATISTICS = {"unet", "resnet"}
"""Batch norm in train mode: its statistics are those of the micro-batches."""


def build(
    name: str, seed: int = 3, samples: int = 22, batch_size: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Base, DataLoader, DataLoader]:
    """The module with its training and validation data, the same in every process; the last batch is smaller.

    In float64 two runs differ by so little that tolerances do not depend on the CPU.
    """
    torch.manual_seed(seed)
    module = MODULES[name]().to(dtype)
    sample = type(module).sample  # type: ignore[attr-defined]
    train, val = Rows(sample, samples, seed + 1, dtype), Rows(sample, 12, seed + 2, dtype)
    return module, DataLoader(train, batch_size=batch_size), DataLoader(val, batch_size=batch_size)
