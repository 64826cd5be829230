"""A fit rehearses its plan first, if it is long enough, and trains as if it had not."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipepart import PipelineStrategy
from pipepart.lightning import recorded_steps
from pipepart.lightning.announce import measured_against_predicted
from pipepart.planning import Plan


class _Module(L.LightningModule):
    """Dropout and running statistics: a rehearsal that left a trace would be seen in the losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.second(self.first(x)), y)

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def _fit(worth: int, batches: int, plan: Plan | None = None, **trainer_options: Any) -> tuple[list[float], str]:
    usual, recorded_steps._WORTH_A_REHEARSAL = recorded_steps._WORTH_A_REHEARSAL, worth
    try:
        L.seed_everything(3, verbose=False)
        module = _Module()
        x = torch.randn(8 * batches, 8)
        data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
        strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b", split_at=["second"], plan=plan)
        trainer = L.Trainer(
            strategy=strategy, devices=2, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, **trainer_options,
        )  # fmt: skip
        trainer.fit(module, data)
        assert strategy.plan.rehearsed == strategy.rehearsed
        assert strategy.runtime.plan.rehearsed == (plan.rehearsed if plan is not None else None)  # it is never replaced
        return module.losses, strategy.plan.to_json()
    finally:
        recorded_steps._WORTH_A_REHEARSAL = usual


@pytest.mark.slow
def test_a_run_trains_as_if_it_had_not_been_rehearsed() -> None:
    with_one = run_ranks(2, _fit, 1, 6, max_epochs=2)
    without = run_ranks(2, _fit, 1000, 6, max_epochs=2)
    plans = [Plan.from_json(text) for _, text in with_one]
    assert plans[0].rehearsed == plans[1].rehearsed
    assert plans[0].rehearsed
    assert plans[0].predicted == plans[0].rehearsed
    assert Plan.from_json(without[0][1]).rehearsed is None
    assert with_one[0][0] == without[0][0]
    assert len(with_one[0][0]) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "options", "rehearses"),
    [(6, {"max_epochs": 9}, True), (6, {"max_epochs": 8}, False), (6, {"max_steps": 3}, False)],
)
def test_not_before_a_run_that_is_hardly_longer(batches: int, options: dict[str, int], rehearses: bool) -> None:
    answers = run_ranks(2, _fit, 50, batches, **options)
    assert (Plan.from_json(answers[0][1]).rehearsed is not None) == rehearses


@pytest.mark.slow
def test_a_rehearsal_elsewhere_does_not_count() -> None:
    plan = dataclasses.replace(Plan.from_json(run_ranks(2, _fit, 1000, 6, max_epochs=1)[0][1]), rehearsed=99.0)
    short, long = (Plan.from_json(run_ranks(2, _fit, worth, 6, plan, max_epochs=1)[0][1]) for worth in (1000, 1))
    assert short.rehearsed is None
    assert long.rehearsed is not None
    assert long.rehearsed < 99.0
    assert short.hash == long.hash == plan.hash


@pytest.mark.slow
def test_what_is_said_after_a_run() -> None:
    plan = Plan.from_json(run_ranks(2, _fit, 1, 6, max_epochs=1)[0][1])
    said = measured_against_predicted(plan, [2 * plan.predicted] * 5)
    assert "(-50%) by rehearsal" in said
    assert "by the costs of its ops" in said
    assert "rehearsed  step" in plan.describe()
