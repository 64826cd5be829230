"""All forms of loss as a LightningModule: weights and logs of a Trainer with a pipeline against one plain process."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from tools.bench.losses.cases import NAMES, Deep, apart
from tools.bench.losses.forms import batch

__all__ = ["fit", "worst_of_trainer"]

SIZE, STEPS, REST = 5, 2, 3
"""Samples of a batch of one replica, optimizer steps with full batches, and samples of the last, shorter batch."""
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1, "precision": "64-true", "use_distributed_sampler": False,
}  # fmt: skip


class Task(L.LightningModule):
    """Trains on the weighted sum of all forms and logs each of them."""

    def __init__(self, forms: tuple[str, ...]) -> None:
        super().__init__()
        self.model = Deep(forms)
        self.seen: list[dict[str, float]] = []

    def training_step(self, samples: Any, batch_idx: int) -> torch.Tensor:
        values = self.model(*samples)
        for name, value in values.items():
            self.log(name, value.detach(), sync_dist=True)
        return values["loss"]

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _loader(size: int, accumulate: int, replicas: int, replica: int = 0, parts: int = 1) -> DataLoader[Any]:
    """Batches of `size` samples; `parts` replicas together read the samples of one process in its order."""
    rest = REST * replicas if accumulate == 1 else 0
    data = batch(SIZE * STEPS * accumulate * replicas + rest, 7)
    return DataLoader(TensorDataset(*(tensor[replica::parts] for tensor in data)), size)


def fit(rank: int, world: int, stages: int, cases: list[tuple[str, int]]) -> list[Any]:
    """Weights and logs of each case on this rank."""
    from pipepart import PipelineStrategy

    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="bench", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    replicas, answers = world // stages, []
    for schedule, accumulate in cases:
        strategy = PipelineStrategy(stages=stages, replicas=replicas, microbatches=4, schedule=schedule)
        loader = _loader(SIZE, accumulate, replicas, rank // stages, replicas)
        trainer = L.Trainer(strategy=strategy, devices=world, accumulate_grad_batches=accumulate, **QUIET)
        answers.append(_trained(trainer, Task(NAMES), loader))
    return answers


def _trained(trainer: L.Trainer, task: Task, loader: DataLoader[Any]) -> Any:
    trainer.fit(task, loader)
    return {name: value.numpy().copy() for name, value in task.state_dict().items()}, task.seen


def worst_of_trainer(answers: list[Any], replicas: int, accumulate: int) -> tuple[float, str]:
    """The largest difference to plain Lightning in one process, which sees each window of all replicas as one batch."""
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.WARNING)
    loader = _loader(SIZE * accumulate * replicas, accumulate, replicas)
    task = Task(NAMES)
    task.model.of_sums = 1 / accumulate
    weights, logs = _trained(L.Trainer(devices=1, **QUIET), task, loader)
    found = [(0.0, "")]
    for own, seen in answers:
        found += [(apart(own[name], torch.as_tensor(value)), name) for name, value in weights.items()]
        if accumulate == 1:  # logs are of a batch, not of a window
            pairs = zip(seen, logs, strict=True)
            found += [(apart(a[name], torch.tensor(b[name])), name) for a, b in pairs for name in b]
    return max(found)
