"""Python state with replicas, and in the steps of test, prediction and validation: as in one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from stateful import Auto
from support.ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset
from watching import QUIET

from pipepart import PipelineStrategy

SIZE, BATCHES = 8, 3


class Everywhere(Auto):
    """A flag and a number that hooks change, read by all steps, and containers that all steps fill."""

    def __init__(self) -> None:
        super().__init__()
        self.use_aux, self.beta = False, 0.0
        self._rows: list[Any] = []
        self.tested: dict[str, list[Any]] = {"loss": [], "rows": []}
        self.hits = 0
        self.predicted: list[Any] = []

    def on_train_epoch_start(self):
        self.beta = 0.25 * self.current_epoch
        self.use_aux = self.current_epoch == 1

    def on_train_batch_start(self, batch, batch_idx):
        self.beta += 0.01

    def weigh(self, kl):
        return self.beta * kl + (kl**2 if self.use_aux else 0.0)

    def training_step(self, batch, batch_idx):
        self._rows.append(batch[0][:, 0])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self.log("val_loss", loss + self.weigh(kl).mean(), sync_dist=True)

    def on_test_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.use_aux, self.beta = batch_idx == 1, 0.5 * batch_idx

    def test_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self.tested["loss"].append(loss)
        self.tested["rows"].append(self.weigh(kl))
        self.log("test_loss", loss + self.weigh(kl).mean(), sync_dist=True)

    def on_predict_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.use_aux, self.beta = batch_idx == 2, 1.0 + batch_idx

    def predict_step(self, batch, batch_idx):
        answer = self.weigh(self.losses(batch)[1])
        self.predicted.append(answer)
        return answer


def _loader(part: tuple[int, int]) -> DataLoader:
    """`part`: the replica, and how many there are; each batch of one process is cut between them."""
    torch.manual_seed(3)
    x, y = torch.randn(SIZE * BATCHES, 6).double(), torch.randn(SIZE * BATCHES, 4).double()
    replica, replicas = part
    rows = torch.arange(SIZE * BATCHES).view(BATCHES, replicas, -1)[:, replica].flatten()
    return DataLoader(TensorDataset(x[rows], y[rows]), SIZE // replicas)


def _run(pipeline: bool, devices: int, replicas: int) -> dict[str, Any]:
    part = (torch.distributed.get_rank() // 2, replicas) if pipeline else (0, 1)
    strategy: Any = PipelineStrategy(stages=2, replicas=replicas, microbatches=2) if pipeline else "auto"
    module = Everywhere()
    options = {**QUIET, "max_epochs": 3, "num_sanity_val_steps": 1}
    trainer = L.Trainer(strategy=strategy, devices=devices, **options)
    trainer.fit(module, _loader(part), _loader(part))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key != "kl"}
    metrics |= {key: float(value) for key, value in trainer.test(module, _loader(part), verbose=False)[0].items()}
    answers = trainer.predict(module, _loader(part))
    return {
        "metrics": metrics, "rows": torch.stack(module._rows), "tested": module.tested, "answers": torch.stack(answers),
        "predicted": torch.stack(module.predicted), "state": dict(module.state_dict()), "beta": module.beta,
    }  # fmt: skip


def _own(rows: torch.Tensor, replica: int, replicas: int) -> torch.Tensor:
    """What a replica has of the rows of whole batches."""
    return rows.view(len(rows), replicas, -1)[:, replica]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equal_to_one_process(replicas: int) -> None:
    expected = _run(False, 1, 1)
    answers = run_ranks(2 * replicas, _run, True, 2 * replicas, replicas, timeout=240)
    for rank, answer in enumerate(answers):
        where = f"rank {rank}"
        assert answer["metrics"] == pytest.approx(expected["metrics"], rel=1e-9), where
        assert answer["beta"] == expected["beta"]
        for key in ("rows", "answers", "predicted"):
            wanted = _own(expected[key], rank // 2, replicas)
            torch.testing.assert_close(answer[key], wanted, rtol=1e-9, atol=1e-12, msg=f"{key} on {where}")
        rows = _own(torch.stack(expected["tested"]["rows"]), rank // 2, replicas)
        torch.testing.assert_close(torch.stack(answer["tested"]["rows"]), rows, rtol=1e-9, atol=1e-12)
        assert len(answer["tested"]["loss"]) == BATCHES
        if replicas == 1:
            torch.testing.assert_close(answer["tested"]["loss"], expected["tested"]["loss"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(answer["state"], expected["state"], rtol=1e-9, atol=1e-12, msg=where)
    if replicas == 2:  # each replica keeps the loss of its own batch: their mean is that of the whole
        for index, wanted in enumerate(expected["tested"]["loss"]):
            found = (answers[0]["tested"]["loss"][index] + answers[2]["tested"]["loss"][index]) / 2
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
