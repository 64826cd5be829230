"""Modules as public libraries write them. The libraries themselves: ``python -m tools.bench.lightning modules``."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from support.ranks import run_ranks
from torch import nn
from torch.distributions import StudentT
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from watching import assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy


def _body(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs)
    ).double()


class Scaled(L.LightningModule):
    """Series divided by their mean, or by that of the batch where nothing was observed; a likelihood (GluonTS)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _body(8, 12)

    def likelihood(self, batch: Any) -> torch.Tensor:
        past, observed = batch["past"], batch["observed"]
        sums, counts = (past.abs() * observed).sum(-1, keepdim=True), observed.sum(-1, keepdim=True)
        of_batch = torch.squeeze(sums.sum(0) / torch.clamp(counts.sum(0), min=1))
        scale = torch.where(counts > 0, sums / torch.clamp(counts, min=1), of_batch)
        df, loc, width = self.body(past / scale).reshape(-1, 4, 3).unbind(-1)
        distribution = StudentT(2 + nn.functional.softplus(df), loc * scale, nn.functional.softplus(width) * scale)
        return -distribution.log_prob(batch["future"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.likelihood(batch).mean()
        self.log("train_loss", loss, on_epoch=True, on_step=False, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.likelihood(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    @staticmethod
    def loader() -> Any:
        drawn = torch.Generator().manual_seed(0)
        rows = torch.randn(24, 20, generator=drawn, dtype=torch.float64)
        observed = (torch.rand(24, 8, generator=drawn) > 0.3).double()
        observed[3::4] = 0.0
        return DataLoader(
            [{"past": r[:8], "observed": o, "future": r[8:12]} for r, o in zip(rows, observed)], batch_size=8
        )


class Columns(Scaled):
    """Windows that the step cuts, columns by a number of the batch in an array (neuralforecast)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _body(10, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        windows = batch["temporal"].unfold(-1, 8, 1).permute(0, 2, 3, 1).flatten(0, 1)
        kept = torch.nonzero(windows[:, :5, 2].sum(1) >= 4).squeeze(-1)
        columns = np.append(batch["y_idx"], [1])
        chosen = windows[kept][:, :, columns]
        loss = mse_loss(self.body(chosen[:, :5].flatten(1)), chosen[:, 5:, 0])
        self.log("train_loss", loss.detach().item(), batch_size=len(batch["temporal"]))
        return loss

    validation_step = training_step

    @staticmethod
    def loader() -> Any:
        drawn = torch.Generator().manual_seed(0)
        rows = torch.randn(24, 3, 20, generator=drawn, dtype=torch.float64)
        rows[:, 2] = (torch.rand(24, 20, generator=drawn) > 0.2).double()

        def collate(samples: Any) -> Any:
            return {"temporal": torch.stack(samples), "y_idx": 0}

        return DataLoader(list(rows), batch_size=8, collate_fn=collate)


class Rates(Scaled):
    """A learning rate that is scaled by the number of processes (lightly); containers of the module made anew (scvi-tools)."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments = {"weights": {"loss": 0.5}, "names": ["a"]}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        moved = move_data_to_device(self.arguments, self.device)
        assert type(moved) is dict and type(moved["names"]) is list
        return self.likelihood(batch).mean() * moved["weights"]["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * self.trainer.world_size * self.trainer.num_devices)


MODULES = {kind.__name__: kind for kind in (Scaled, Columns, Rates)}


def _fits(strategy: bool) -> dict[str, Any]:
    found = {}
    for name, kind in MODULES.items():
        torch.manual_seed(0)
        chosen: Any = PipelineStrategy(stages=2, microbatches=2) if strategy else "auto"
        found[name] = run_fit(kind(), kind.loader(), kind.loader(), chosen, 2 if strategy else 1)
    return found


@pytest.mark.slow
def test_equal_to_one_device() -> None:
    expected, answers = _fits(False), run_ranks(2, _fits, True, timeout=240)
    for name in MODULES:
        for rank, answer in enumerate(answers):
            assert_same_run(answer[name], expected[name], f"{name} on rank {rank}")
        assert_same_state(answers[0][name]["state"], expected[name]["state"], name)
