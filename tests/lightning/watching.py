"""Runs of a Trainer with everything written down that must be equal to a run on one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy

__all__ = [
    "ONE_RANK",
    "QUIET",
    "MicrobatchesByHand",
    "Notes",
    "Written",
    "assert_same_run",
    "assert_same_state",
    "run_fit",
]

ONE_RANK: Any = SimpleNamespace(groups=None, parameters=SimpleNamespace(divides_updates=False))
"""What a save of shards needs to know of a job of one process."""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
    "logger": False,
}


class Written(Logger):
    """Keeps what the trainer sends to loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    name = version = "written"

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, {key: float(value) for key, value in metrics.items()}))

    def log_hyperparams(self, *args, **kwargs):
        pass


_HOOKS = [
    name for name in vars(Callback) if name.startswith("on_") and "checkpoint" not in name and name != "on_exception"
]


class Notes(Callback):
    """The order of all hooks, losses, learning rates."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.losses: list[float] = []
        self.rates: list[list[float]] = []


def _note(name: str):
    def hook(self, trainer, module, *args, **kwargs):
        self.order.append(name)
        if name == "on_train_batch_end":
            self.losses.append(float(args[0]["loss"]))
            self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    return hook


for _name in _HOOKS:
    setattr(Notes, _name, _note(_name))


class MicrobatchesByHand(SingleDeviceStrategy):
    """One device in plain Lightning that takes the batch in micro-batches: the reference for batch norm."""

    def __init__(self, microbatches: int) -> None:
        super().__init__(device="cpu")
        self.microbatches = microbatches

    def training_step(self, batch, batch_idx):
        leaves, tree = torch.utils._pytree.tree_flatten(batch)
        size = len(leaves[0])
        count = min(self.microbatches, size)
        sizes = [size // count + (i < size % count) for i in range(count)]
        parts = zip(*(leaf.split(sizes) for leaf in leaves))
        losses = [
            self.lightning_module.training_step(torch.utils._pytree.tree_unflatten(part, tree), batch_idx)
            for part in parts
        ]
        return sum(loss * part / size for loss, part in zip(losses, sizes))


def run_fit(module: L.LightningModule, train, val, strategy: Any, devices: int, **options: Any) -> dict[str, Any]:
    """Fit, and return all that can be compared."""
    notes, written = Notes(), Written()
    options = {**QUIET, "max_epochs": 2, "log_every_n_steps": 1, "logger": written, **options}
    callbacks = [notes, *options.pop("callbacks", [])]
    trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=callbacks, **options)
    trainer.fit(module, train, val)
    state = trainer.strategy.lightning_module_state_dict()
    return {
        "state": {key: value.clone() for key, value in state.items()},
        "order": notes.order,
        "losses": notes.losses,
        "rates": notes.rates,
        "logged": written.lines,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "bar": {key: float(value) for key, value in trainer.progress_bar_metrics.items()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def assert_same_run(got: dict[str, Any], expected: dict[str, Any], where: str, relative: float = 1e-8) -> None:
    """Hooks, counters, learning rates, losses and metrics of a rank are those of one device."""
    assert got["order"] == expected["order"], f"{where}: hooks"
    assert (got["step"], got["epoch"]) == (expected["step"], expected["epoch"]), where
    assert got["rates"] == expected["rates"], where
    assert got["losses"] == pytest.approx(expected["losses"], rel=relative, abs=1e-10), where
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=max(5 * relative, 1e-6), abs=1e-6), (
        where
    )  # in float32


def assert_same_state(got: dict[str, Any], expected: dict[str, Any], where: str, relative: float = 1e-7) -> None:
    assert list(got) == list(expected), where
    for key, value in expected.items():
        difference = (got[key].double() - value.double()).abs().max()
        assert difference <= relative * value.double().abs().max() + 1e-7, f"{where}: {key} differs by {difference}"
