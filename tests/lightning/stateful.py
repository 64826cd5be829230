"""LightningModules whose steps read or fill Python state, as people write them: nothing here knows of pipelines."""

from __future__ import annotations

import argparse
import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["FILLING", "READING", "REFUSED", "loaders"]

WEIGHT = 0.0
SWITCHES = {"aux": False, "weights": [1.0, 0.5]}


def set_globals(epoch: int) -> None:
    global WEIGHT
    WEIGHT = 0.1 * epoch
    SWITCHES["aux"] = epoch % 2 == 1


def loaders() -> tuple[DataLoader, DataLoader]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(16, 6, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64))
    return DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)


class Auto(L.LightningModule):
    """A small network with two losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh())
        self.head = nn.Linear(10, 4)
        self.double()

    def losses(self, batch):
        x, y = batch
        h = self.body(x)
        return F.mse_loss(self.head(h), y), h.pow(2).mean(1)

    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self.log("kl", kl.mean())
        return loss + self.weigh(kl).mean()

    def validation_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self.log("val_loss", loss + self.weigh(kl).mean())

    def weigh(self, kl):
        return kl

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ---- state that a step reads


class Annealed(Auto):
    """KL annealing by epoch, logged."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0

    def on_train_epoch_start(self):
        self.beta = min(1.0, 0.25 * self.current_epoch)

    def weigh(self, kl):
        self.log("beta", self.beta)
        return self.beta * kl


class AnnealedByBatch(Auto):
    """Another value at every batch, through `math`, and a counter that a hook keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += 1

    def weigh(self, kl):
        return kl * (1 - math.cos(math.pi * min(1.0, self.seen / 7))) / 2


class Flagged(Auto):
    """A flag, a text and a member of an enum decide."""

    class Mode(enum.Enum):
        PLAIN = 0
        EXTRA = 1

    def __init__(self) -> None:
        super().__init__()
        self.use_aux, self.kind, self.mode = False, "square", self.Mode.PLAIN

    def on_train_epoch_start(self):
        self.use_aux = self.current_epoch in (1, 3)
        self.kind = "square" if self.current_epoch < 2 else "root"
        self.mode = self.Mode.EXTRA if self.current_epoch == 2 else self.Mode.PLAIN

    def weigh(self, kl):
        extra = kl * 3 if self.use_aux else 0.0
        if self.mode is self.Mode.EXTRA:
            extra = extra + 1.5 * kl
        return extra + (kl**2 if self.kind == "square" else kl.sqrt())


@dataclass
class Settings:
    beta: float = 0.0
    unused: int = 0
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(gamma=0.0))


class Slotted:
    __slots__ = ("delta",)

    def __init__(self) -> None:
        self.delta = 0.0


class Namespaces(Auto):
    """Values in objects of all kinds, changed in place and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.slotted, self.args = Settings(), Slotted(), argparse.Namespace(eps=0.0)
        self.cfg: dict[str, Any] = {"loss": {"beta": 0.0}, "names": ["a"]}
        self.omega = OmegaConf.create({"loss": {"beta": 0.0}})
        self.space = SimpleNamespace(zeta=0.0)
        self.save_hyperparameters({"eta": 0.0})

    def on_train_epoch_start(self):
        epoch = self.current_epoch
        self.settings.beta, self.settings.inner.gamma, self.slotted.delta = 0.1 * epoch, 0.2 * epoch, 0.3 * epoch
        self.settings.unused += 1
        self.args.eps, self.hparams.eta = 0.05 * epoch, 0.07 * epoch
        self.cfg["loss"]["beta"] = 0.4 * epoch
        self.omega.loss.beta = 0.5 * epoch
        self.space = SimpleNamespace(zeta=0.6 * epoch)

    def weigh(self, kl):
        loss = self.settings.beta * kl + self.settings.inner.gamma * kl.sqrt() + self.slotted.delta * kl**2
        loss = loss + self.args.eps * kl + self.cfg["loss"]["beta"] * kl**3 + self.omega.loss.beta * kl
        return loss + self.space.zeta * kl + self.hparams.eta * kl


class Globals(Auto):
    """Variables of the file and of an enclosing function, and attributes of a class."""

    level = 0.0

    def __init__(self) -> None:
        super().__init__()
        rate = 0.0

        def weigh(kl):
            return rate * kl

        def set_rate(value):
            nonlocal rate
            rate = value

        self.by_closure, self.set_rate = weigh, set_rate

    def on_train_epoch_start(self):
        set_globals(self.current_epoch)
        self.set_rate(0.3 * self.current_epoch)
        type(self).level = 0.01 * self.current_epoch

    def weigh(self, kl):
        loss = WEIGHT * kl + self.by_closure(kl) + self.level * kl
        return loss + kl * SWITCHES["weights"][0] if SWITCHES["aux"] else loss


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.scale, self.skip, self.rate = 1.0, False, 0.0

    def forward(self, x):
        out = self.linear(x) * self.scale
        return x + out if self.skip else out


class Submodules(Auto):
    """State of a submodule, and its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(Part().double())

    def on_train_epoch_start(self):
        part = self.body[-1]
        part.scale, part.skip = 1.0 + 0.1 * self.current_epoch, self.current_epoch > 1


class OfTrainer(Auto):
    """What the trainer says of the run."""

    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        if self.trainer.is_last_batch:
            loss = loss + kl.mean()
        if self.trainer.training and self.trainer.state.fn == TrainerFn.FITTING:
            self.log("fitting", loss)
        if self.trainer.is_global_zero:
            self.log("of_zero", loss)
        return loss * (1 - self.current_epoch / self.trainer.max_epochs)

    def validation_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        if not self.trainer.sanity_checking:
            self.log("val_loss", loss)
        if self.trainer.validating or self.trainer.current_epoch > 0:
            self.log("later", kl.mean())


class CountedValidation(Auto):
    """Values that hooks of validation set, for validation and training."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds, self.best, self.weights = 0, None, torch.zeros((), dtype=torch.float64)

    def on_validation_epoch_end(self):
        self.rounds += 1
        self.best = 0.5 * self.rounds
        self.weights = torch.full((), 0.1 * self.rounds, dtype=torch.float64)

    def weigh(self, kl):
        self.log("rounds", float(self.rounds) if self.best is None else self.rounds * 1.0)
        return kl if self.best is None else kl * self.best + self.weights * kl


class Lazy(Auto):
    """Sets itself up in its first step."""

    def weigh(self, kl):
        if not hasattr(self, "_mask"):
            self._mask = torch.ones(3, dtype=torch.float64) * 0.5
        return kl * self._mask.sum()


class Averaged(Auto):
    """A running mean of the loss, kept from step to step and used in it."""

    def __init__(self) -> None:
        super().__init__()
        self._mean = None

    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self._mean = loss.detach() if self._mean is None else 0.9 * self._mean + 0.1 * loss.detach()
        self.log("mean", self._mean)
        return loss + self._mean * kl.mean()


READING: dict[str, type[Auto]] = {
    kind.__name__: kind
    for kind in (
        Annealed, AnnealedByBatch, Flagged, Namespaces, Globals, Submodules, OfTrainer, CountedValidation, Lazy,
        Averaged,
    )
}  # fmt: skip


# ---- containers that a step fills


class Store:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def keep(self, row: Any) -> None:
        self.rows.append(row)


class Containers(Auto):
    """Containers of all kinds and names; what they hold is compared."""

    of_class: list[Any] = []

    def __init__(self) -> None:
        super().__init__()
        self._outs: list[Any] = []
        self.by_name: defaultdict[str, list[Any]] = defaultdict(list)
        self._window: deque[Any] = deque(maxlen=3)
        self.counts: Counter[str] = Counter()
        self.nested: dict[str, Any] = {"train": [], "deep": {"val": []}}
        self.store = Store()
        self._last: dict[str, Any] = {}
        self.ordered: OrderedDict[str, Any] = OrderedDict()
        self.names: set[str] = set()
        self.lazily: dict[str, Any] = {}
        self.body[0]._inputs = []
        self.taken: list[Any] = []
        type(self).of_class.clear()

    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        x, y = batch
        kl = kl.mean()
        self._outs.append(loss.detach())
        self.by_name["x"].append(x)
        self.by_name["kl"].append(kl.item())
        self._window.append({"loss": loss.detach(), "y": y.sum(1)})
        self.counts.update({"samples": len(x), "steps": 1})
        self.nested["train"].append((kl.detach(), "name"))
        self.nested["deep"]["val"] += [kl.detach()]
        self.store.keep(x.mean(1))
        self._last["loss"] = loss.detach()
        self.ordered["kl"] = self._last["loss"] * 2
        self.names.add("train")
        self.lazily.setdefault("rows", []).append(y)
        self.of_class.append(x[:, 0])
        return loss

    def validation_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self._outs.append(loss)
        if "val" not in self.lazily:
            self.lazily["val"] = []
        self.lazily["val"].append(kl)
        self.names.update({"val", "done"})

    def state(self) -> dict[str, Any]:
        return {
            "outs": self._outs, "by_name": self.by_name, "window": self._window, "counts": self.counts,
            "nested": self.nested, "rows": self.store.rows, "last": self._last, "ordered": self.ordered,
            "names": sorted(self.names), "lazily": self.lazily, "of_class": type(self).of_class, "taken": self.taken,
        }  # fmt: skip

    def on_train_epoch_end(self):
        self.taken.append(torch.stack(self._outs).mean())
        self._outs.clear()


FILLING = {"Containers": Containers}


# ---- what is refused


class DecidingAllTheTime(Auto):
    """Another branch at every step, by a text."""

    def on_train_batch_start(self, batch, batch_idx):
        self.label = f"step {self.global_step}"

    def weigh(self, kl):
        return kl * len(str(getattr(self, "label", "")))


class Adding(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.sums: defaultdict[str, float] = defaultdict(float)

    def weigh(self, kl):
        self.sums["kl"] += kl.mean().detach()
        return kl


class Queue(Auto):
    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Any] = deque([[1], [2]])

    def weigh(self, kl):
        self._queue.popleft()
        return kl


class FilledLater(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def weigh(self, kl):
        row: dict[str, Any] = {}
        self.rows.append(row)
        row["kl"] = kl
        return kl


class DifferentRanks(Auto):
    """A flag that one rank alone sets."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = False

    def on_train_batch_start(self, batch, batch_idx):
        self.flag = self.global_step > 0 and self.trainer.global_rank == 0

    def weigh(self, kl):
        return kl * 2 if self.flag else kl


REFUSED: dict[str, tuple[type[Auto], str]] = {
    "deciding": (DecidingAllTheTime, "self.label (was 'step "),
    "adding": (Adding, "the step reads item 'kl' of self.sums and then sets it"),
    "queue": (Queue, "the step calls popleft on self._queue, which holds other containers"),
    "filled later": (FilledLater, "the step puts a dict into self.rows and changes it afterwards"),
    "ranks": (DifferentRanks, "self.flag is True on stage 0 and False on stage 1"),
}
