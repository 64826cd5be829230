"""LightningModules as users and libraries write them: nothing here knows of pipelines."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from stateful import Auto
from torch import nn
from torchmetrics import Metric, MetricCollection, R2Score
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["CASES", "REFUSED"]


# ---- attributes, numbers, containers


class Counting(Auto):
    """Counters, flags and texts that the step itself sets, and sets to the same value again."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.h, self.count, self.first, self.mode, self.total, self.correct = 4, 0, True, "none", 0.0, 0

    def training_step(self, batch, batch_idx):
        assert isinstance(batch_idx, int)
        self.h = 4
        self.mode = "train"
        self.count += 1
        self.seen += batch[0].shape[0]
        loss, kl = self.losses(batch)
        loss = loss * (1 + 0.1 * self.count) if self.mode == "train" else loss * 100
        if self.first:
            loss, self.first = loss * 2, False
        self.total += loss.item()
        self.correct += int((batch[1] > 0).sum())
        self.log("seen", float(self.seen))
        self.log("perplexity", math.exp(loss.item()))
        self.log("rounded", round(self.total / self.count, 3))
        return {
            "loss": loss,
            "n_samples": len(batch[0]),
            "tokens": batch[0].numel() + 1,
            "kl": (kl.detach(), "kl", None),
        }

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("of_outputs", outputs["n_samples"] * 1000.0 + outputs["tokens"] + outputs["kl"][0].sum())
        self.log("kept", 1000.0 * self.correct + self.count)


class Filling(Auto):
    """Items that are added to, taken out, replaced; a list that each step makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.queue, self.window, self.table = [1.0, 2.0, 3.0], [0.0, 0.0], {"a": 1.0, "b": 2.0}
        self.outs: list[Any] = []

    def training_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        self.sums["loss"] += loss.item()
        self.sums["steps"] += 1
        self.outs.clear()
        self.outs.append(loss.detach())
        self.queue.pop()
        self.queue.append(float(self.global_step))
        self.window[1] += 1
        self.table.pop("b", None)
        self.table["b"] = self.window[1] * 2
        self.fresh = []
        self.fresh.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("n", float(len(self.outs) + len(self.fresh)))
        self.log("kept", sum(self.queue) + sum(self.window) + sum(self.table.values()) + sum(self.sums.values()))


# ---- buffers that a step assigns


class Codebook(nn.Module):
    """The codebook of a VQ-VAE, which follows the mean of its vectors."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        codes = torch.randn(5, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for name, value in (("codes", codes), ("size", torch.ones(5).double()), ("mean", codes.clone())):
            self.register_buffer(name, value)

    def forward(self, h):
        chosen = F.one_hot(torch.cdist(h, self.codes).argmin(1), 5).to(h.dtype)
        codes = chosen @ self.codes
        if self.training:
            size = self.size * 0.9 + chosen.sum(0) * 0.1
            mean = self.mean * 0.9 + (chosen.t() @ h.detach()) * 0.1
            if self.how == "assign":
                self.size, self.mean = size, mean
                self.codes = self.mean / (self.size + 1e-5).unsqueeze(1)
            elif self.how == "data":
                self.size.data, self.mean.data = size, mean
                self.codes.data = self.mean / (self.size + 1e-5).unsqueeze(1)
            else:
                self.size.copy_(size)
                self.mean.copy_(mean)
                self.codes.copy_(self.mean / (self.size + 1e-5).unsqueeze(1))
        return h + (codes - h).detach(), F.mse_loss(h, codes.detach())


class Vectors(Auto):
    how = "assign"

    def __init__(self) -> None:
        super().__init__()
        self.codebook = Codebook(self.how)
        self.register_buffer("ema", torch.zeros(10, dtype=torch.float64))

    def losses(self, batch):
        x, y = batch
        h = self.body(x) - self.ema
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
        codes, commitment = self.codebook(h)
        return F.mse_loss(self.head(codes), y) + 0.25 * commitment, h.pow(2).mean(1)


class VectorsData(Vectors):
    how = "data"


class VectorsInPlace(Vectors):
    how = "in place"


class Sums(Auto):
    """Sums over all batches in buffers that start at zero: alone, a sum with zero looks like a sum over micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("counts", torch.zeros(4)), ("total", torch.zeros(10)), ("seen", torch.tensor(0))):
            self.register_buffer(name, value.double() if value.dim() else value)

    def losses(self, batch):
        x, y = batch
        h = self.body(x)
        if self.training:
            self.counts.add_(F.one_hot(y.argmax(1), 4).sum(0))
            self.total = self.total + h.detach().sum(0)
            self.seen += len(x)
            self.log("seen", self.seen.double())
            self.log("ahead", float(int(self.seen) + len(x)))
            self.log("first", self.counts[0])
        return F.mse_loss(self.head(h), y) + 0.1 * (h - self.total / self.seen).pow(2).mean(), h.pow(2).mean(1)


class LateTerm(Auto):
    """A mean of the loss in a buffer. A term with a denominator of its own has the weight zero when the step is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        loss, squares = self.losses(batch)
        chosen = (batch[0][:, 0] > 0).double()
        loss = loss + self.current_epoch / 2 * (squares * chosen).sum() / chosen.sum()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * loss)
        return loss


class Queue(Auto):
    """Keys of the last batches in a queue, with a place to write that is a buffer (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(10, 16, dtype=torch.float64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def losses(self, batch):
        x, y = batch
        h = self.body(x)
        similar = h @ self.queue.clone()
        if self.training:
            place, size = int(self.place), h.shape[0]
            self.queue[:, place : place + size] = h.detach().t()
            self.place[0] = (place + size) % 16
        return F.mse_loss(self.head(h), y) + 0.1 * similar.pow(2).mean(), h.pow(2).mean(1)


# ---- the trainer


class Reading(Auto):
    """Reads the strategy, numbers of processes and learning rates."""

    def training_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        if (
            isinstance(self.trainer.strategy, DDPStrategy)
            or self.trainer.world_size > 1
            or self.trainer.num_devices > 1
        ):
            loss = loss * 100
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("last", self.lr_schedulers().get_last_lr()[0])
        self.log("config", self.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])
        return loss * (1 + self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# ---- metrics


class Absolute(Metric):
    """A loss that is a metric, as forecasting libraries have them."""

    full_state_update = False

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.power = power
        self.add_state("losses", default=torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("lengths", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, prediction, target):
        self.losses = self.losses + (prediction - target).abs().pow(self.power).sum()
        self.lengths = self.lengths + target.numel()

    def compute(self):
        return self.losses / self.lengths


class MetricLoss(Auto):
    """The loss is a metric, and so is a part of it; both are also metrics of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.square = Absolute(), Absolute(2)
        self.accuracy, self.score = MulticlassAccuracy(4), R2Score().double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.head(self.body(x))
        loss = self.loss(prediction, y)
        self.square.reset()
        self.square.update(prediction, y)
        weight = 1 + self.accuracy(prediction, y.argmax(1)) + 0.1 * self.score(prediction[:, 0], y[:, 0]).clamp(-1, 1)
        loss = weight.detach() * loss + 0.1 * self.square.compute()
        self.log("loss", self.loss, on_step=True, on_epoch=True)
        return {"loss": loss, "n_samples": x.size(0)}

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(self.head(self.body(batch[0])), batch[1]))


class Inside(Metric):
    """A metric with another one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.tensor(0.0, dtype=torch.float64))
        self.inner = Absolute()

    def update(self, prediction, target):
        self.total = self.total + prediction.sum()
        self.inner.update(prediction, target)

    def compute(self):
        return self.total + self.inner.compute()


class Holder:
    def __init__(self) -> None:
        self.metric = Absolute()


class Metrics(Auto):
    """Metrics in metrics, composed ones whose parts are logged too, and metrics in plain objects."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.holder, self.plain = Inside(), Holder(), {"m": Absolute(2)}
        self.one, self.two = Absolute(), Absolute(2)
        self.sum = self.one + self.two
        self.all = MetricCollection({"sum": self.sum, "one": self.one, "two": self.two})

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.head(self.body(x))
        kept = prediction.detach()
        self.inside(kept, y)
        self.holder.metric.update(kept, y)
        self.plain["m"].update(kept, y)
        self.sum.update(kept, y)
        self.log("inside", self.inside)
        self.log("held", self.holder.metric.compute())
        self.log_dict({"sum": self.sum, "one": self.one, "two": self.two}, on_step=False, on_epoch=True)
        return F.mse_loss(prediction, y)

    def on_train_epoch_end(self):
        self.log("inner", self.inside.inner.compute())
        self.log("plain", self.plain["m"].compute() + self.holder.metric.compute())
        self.holder.metric.reset()
        self.plain["m"].reset()


class Dividing(Auto):
    """Divides tensors whose number of rows depends on the data."""

    def losses(self, batch):
        x, y = batch
        h = self.body(x)
        kept = h[y[:, 0] > -0.5]
        left, right = kept.split([4, 6], 1)
        columns = sum(column.sum() for column in torch.cat([left, right], 1).unbind(1))
        return F.mse_loss(self.head(h), y) + 0.01 * columns / kept.shape[0], h.pow(2).mean(1)


_KINDS = (
    *(Counting, Filling, Vectors, VectorsData, VectorsInPlace, Sums, LateTerm, Queue, Reading, MetricLoss, Metrics),
    Dividing,
)
CASES: dict[str, type[Auto]] = {kind.__name__: kind for kind in _KINDS}


# ---- what is refused


class Clock(Auto):
    def training_step(self, batch, batch_idx):
        self.started = time.perf_counter()
        return self.losses(batch)[0]


class Objects(Auto):
    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self.distribution = torch.distributions.Normal(kl.mean(), 1.0)
        return loss


class OtherForm(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self.last = kl.detach().mean()
        return loss


class LayerDrop(Auto):
    def losses(self, batch):
        h = self.body[1](self.body[0](batch[0]))
        if not (self.training and torch.rand(()) < 0.5):
            h = self.body[3](self.body[2](h))
        return F.mse_loss(self.head(h), batch[1]), h.pow(2).mean(1)


class Stepping(Auto):
    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        return self.losses(batch)[0]


class Gathering(Auto):
    def training_step(self, batch, batch_idx):
        return self.trainer.strategy.reduce(self.losses(batch)[0])


class SoFar(Auto):
    """The value of a metric over all batches so far, in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Absolute()

    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self.mean.update(kl.detach(), kl.detach() * 0)
        return loss * self.mean.compute()


REFUSED: dict[str, tuple[type[Auto], str]] = {
    "clock": (Clock, "set started: two runs of the step on one state gave"),
    "object": (Objects, "the step sets self.distribution to an object of the class Normal"),
    "form of a buffer": (OtherForm, "the step sets self.last, a buffer, to torch.float64 of shape () instead of"),
    "layer drop": (LayerDrop, "Python branches on a random number"),
    "optimizer": (Stepping, "the step uses 'zero_grad' of an optimizer"),
    "strategy": (Gathering, "the step calls trainer.strategy.reduce"),
    "metric so far": (SoFar, "the step computes with the value of metric mean"),
}
