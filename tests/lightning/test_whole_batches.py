"""Batches without a tensor that has samples (Python numbers, texts): they are one sample, and equal to one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy
from pipepart.errors import PlanError


class Numbers(L.LightningModule):
    """Its batches are numbers, alone or in containers, or tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            batch = batch["scale"] * torch.tensor(batch["row"], dtype=torch.float64)
        elif not isinstance(batch, torch.Tensor):
            batch = torch.ones(3, dtype=torch.float64) * batch
        return self.layers(batch).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _rows() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(torch.randn(12, 3, dtype=torch.float64), batch_size=6)


_DATA: dict[str, Any] = {
    "numbers": lambda: (range(1, 5), [0.5, 1.5]),
    "containers": lambda: (
        DataLoader([{"scale": 0.5 * i, "row": [1.0, i, 2 * i]} for i in range(4)], batch_size=None),  # type: ignore[arg-type]
        None,
    ),
    "numbers after tensors": lambda: (_rows(), [0.5, 1.5]),
}


def _fit(name: str, pipeline: bool) -> dict[str, Any]:
    more = {"microbatches": 3} if name == "numbers after tensors" else {}
    strategy: Any = PipelineStrategy(stages=2, **more) if pipeline else "auto"
    return run_fit(Numbers(), *_DATA[name](), strategy, 2 if pipeline else 1, num_sanity_val_steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", _DATA)
def test_equal_to_one_process(name: str) -> None:
    expected, answers = _fit(name, False), run_ranks(2, _fit, name, True)
    for rank, answer in enumerate(answers):
        assert_same_run(answer, expected, f"{name} on rank {rank}")
    assert_same_state(answers[0]["state"], expected["state"], name)


def test_several_microbatches_are_refused_by_name() -> None:
    strategy = PipelineStrategy(stages=1, microbatches=2)
    with pytest.raises(
        PlanError, match=r"(?s)cannot be split into 2 micro-batches: it has no tensor .* use microbatches=1"
    ):
        run_fit(Numbers(), range(1, 5), None, strategy, 1)
