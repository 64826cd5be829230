"""LightningModules whose steps print, warn, log by hand and count, as people write them: nothing here knows of pipelines."""

from __future__ import annotations

import io
import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from stateful import Auto
from torch import nn

__all__ = ["CASES", "REFUSED"]

LOG = logging.getLogger("of the user")


class Sizes(Auto):
    """Means that are weighed by numbers of the batch."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss, kl = self.losses(batch)
        mask = x[:, 0] > 0
        epoch: dict[str, Any] = {"on_epoch": True, "on_step": False}
        self.log("length", loss, batch_size=len(x), **epoch)
        self.log("int", kl.mean(), batch_size=int(mask.sum()), **epoch)
        self.log("tensor", kl.mean(), batch_size=mask.sum(), **epoch)
        self.log("product", kl.mean(), batch_size=x.size(0) * x.size(1), **epoch)
        self.log("both", kl.mean(), on_epoch=True, on_step=True, batch_size=mask.sum().item())
        self.log_dict({"first": kl.mean(), "second": loss}, batch_size=mask.float().sum().item() + batch_idx, **epoch)
        self.log("constant", kl.mean(), batch_size=1, **epoch)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        self.log("val_loss", loss, batch_size=int((batch[0][:, 0] > 0).sum()))


class Printing(Auto):
    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        print("loss", loss.item(), kl.detach().sum(), batch[0].shape, {"n": len(batch[0])})
        print(f"[{self.current_epoch}/{batch_idx}] {loss.item():.6f} {loss:>9.3f} {kl.mean()!s}", end=" |\n")
        self.print(f"n={len(batch[0])}", float(loss), self.global_step)
        self.trainer.print("rows", kl[:3].detach())
        if batch_idx == 1:
            print("{:.4f} is {}".format(loss.item(), "low" if batch_idx else "high"))
        return loss

    def validation_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        self.log("val_loss", loss)
        print("val", round(loss.item(), 4), "rows", batch[0][:4, 0])


class Logging(Auto):
    """Calls loggers, their experiments, logs of Python and warnings."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss, kl = self.losses(batch)
        self.logger.log_metrics({"own": loss.item(), "n": len(x)}, step=self.global_step)
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        if batch_idx == 0:
            self.logger.experiment.add_image("first", x[0], self.current_epoch)
            self.logger.experiment.add_histogram("kl", kl, global_step=self.global_step)
        for logger in self.trainer.loggers:
            logger.experiment["train/loss"].append(loss.item())
        if self.logger.name == "kept":
            self.report(loss)
        LOG.warning("constant")
        LOG.warning("loss %.4f of %d", loss.item(), len(x))
        rank_zero_info(f"loss {loss.item():.5f}")
        if batch_idx == 1:
            warnings.warn(f"the loss is {loss.item():.5f}", RuntimeWarning, stacklevel=1)
        return loss

    @rank_zero_only
    def report(self, loss):
        self.logger.log_hyperparams({"last": loss.item()})

    def validation_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        self.log("val_loss", loss)
        self.logger.experiment.add_image("val", batch[0][:4], self.global_step)


class Counted(nn.Module):
    """A part that is one op by itself, since it asks for its mode."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64))
        self.calls, self.rows, self.last, self.sizes = 0, 0, None, []

    def forward(self, h):
        if self.training:
            self.calls += 1
            self.rows += h.shape[0]
            self.last = float(h.detach().mean())
            self.sizes.append(h.shape[0])
        return h * self.weight


class Warming(nn.Module):
    """A part that computes with its counter, made of several ops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps, self.state = nn.Linear(10, 10).double(), 0, "new"

    def forward(self, h):
        self.steps += 1
        self.state = "warm" if self.steps > 3 else "cold"
        return self.linear(h) * min(1.0, self.steps / 5)


class Counting(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.warming, self.last = Counted(6), Warming(), Counted(10)

    def losses(self, batch):
        x, y = batch
        h = self.last(self.warming(self.body(self.first(x))))
        return F.mse_loss(self.head(h), y), h.pow(2).mean(1)


CASES: dict[str, type[Auto]] = {kind.__name__: kind for kind in (Sizes, Printing, Logging, Counting)}


# ---- what is refused


class ByNumpy(nn.Module):
    """Running statistics that numpy computes: kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(10, dtype=torch.float64))
        self.linear = nn.Linear(10, 10).double()

    def forward(self, h):
        if self.training:
            self.mean.mul_(0.9).add_(torch.from_numpy(h.detach().numpy().mean(0)), alpha=0.1)
        return self.linear(h)


class CountsByNumpy(ByNumpy):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h):
        self.calls += 1
        return self.linear(h) + float(h.detach().numpy().mean())


class WholeBuffers(Auto):
    kind: type[nn.Module] = ByNumpy

    def __init__(self) -> None:
        super().__init__()
        self.part = self.kind()

    def losses(self, batch):
        h = self.part(self.body(batch[0]))
        return F.mse_loss(self.head(h), batch[1]), h.pow(2).mean(1)


class WholeCounter(WholeBuffers):
    kind = CountsByNumpy


class ResultOfLogger(Auto):
    def training_step(self, batch, batch_idx):
        if self.logger.experiment.add_scalar("loss", 1.0):
            return self.losses(batch)[0]
        return self.losses(batch)[0] * 2


class PrintsObject(Auto):
    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        print(torch.distributions.Normal(kl.detach(), 1.0))
        return loss


class WritesFile(Auto):
    def training_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        with open(f"losses_of_{self.current_epoch}.txt", "a") as file:
            file.write(f"{loss.item()}\n")
        return loss


class SavesTensor(Auto):
    def validation_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        torch.save(kl, "kl.pt")
        return loss


class OpenFile(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.file = io.StringIO()

    def training_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        self.file.write(f"{loss.item()}\n")
        return loss


class LazyBuffer(Auto):
    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        if not hasattr(self, "mean_kl"):
            self.register_buffer("mean_kl", kl.detach().mean())
        return loss + self.mean_kl


class SetsDropout(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def training_step(self, batch, batch_idx):
        self.drop.p = min(0.5, 0.1 * (self.global_step + 1))
        return self.drop(self.losses(batch)[0])


class OwnScheduler(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def training_step(self, batch, batch_idx):
        self.scheduler.step()
        return self.losses(batch)[0]

    def configure_optimizers(self):
        return self.optimizer


class ByPercent(Auto):
    def training_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        LOG.warning("loss " + "%.4f" % loss.item())  # noqa: UP031
        return loss


REFUSED: dict[str, tuple[type[Auto], str]] = {
    "buffers": (WholeBuffers, "changes its buffer 'part.mean', and would do so once for each micro-batch"),
    "counter": (WholeCounter, "module 'part' (CountsByNumpy) is kept whole and changes its attribute 'calls'"),
    "result": (ResultOfLogger, "the step uses the result of self.logger.experiment.add_scalar"),
    "file": (WritesFile, "the step opens 'losses_of_0.txt' for writing, at outside.py:"),
    "save": (SavesTensor, "the step calls torch.save with 'kl.pt', at outside.py:"),
    "open file": (OpenFile, "the step uses self.file, an open file"),
    "buffer": (LazyBuffer, "the step registers the buffer 'mean_kl'"),
    "dropout": (
        SetsDropout,
        "the step sets self.drop.p, an attribute of a module of torch, to another value, at outside.py:",
    ),
    "scheduler": (OwnScheduler, "the step uses self.scheduler, an object of the class ExponentialLR"),
    "percent": (ByPercent, "makes a text of values in a way that cannot be repeated, such as by %"),
    "object": (PrintsObject, "the step calls print with an object of the class Normal"),
}
