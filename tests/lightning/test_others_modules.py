"""Modules as public libraries write them. The libraries themselves: ``python -m tools.bench.lightning modules``."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import ProgressBar
from support.ranks import run_ranks
from torch import nn
from torch.distributions import StudentT
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric
from watching import assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy
from pipepart.errors import PipepartError


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


class Channels(Scaled):
    """A scale of the batch for each channel, where a sample has none (iTransformer of GluonTS)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _body(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        past, observed = batch["past"].reshape(-1, 4, 2), batch["observed"].reshape(-1, 4, 2)
        sums, counts = (past.abs() * observed).sum(1, keepdim=True), observed.sum(1, keepdim=True)
        of_batch = torch.squeeze(sums.sum(0) / torch.clamp(counts.sum(0), min=1))
        scale = torch.where(counts > 0, sums / torch.clamp(counts, min=1), of_batch)
        return mse_loss(self.body((past / scale).flatten(1)) * scale[:, 0], batch["future"][:, :2])

    validation_step = training_step


class Padded(nn.GRU):
    """A recurrent layer for sequences of several lengths (pytorch-forecasting)."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(super().forward(packed)[0], batch_first=True)[0]


class Reversed(nn.Module):
    """Keeps the statistics of its input for the way back (layers of neuralforecast)."""

    def forward(self, x: torch.Tensor, back: bool = False) -> torch.Tensor:
        if back:
            return x * self.width + self.last
        self.last = x[:, -1:].detach()
        self.width = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
        return (x - self.last) / self.width


class Recurrent(Scaled):
    """Sequences of several lengths, and a metric as the loss that the step configures (pytorch-forecasting)."""

    def __init__(self) -> None:
        super().__init__()
        self.reversed, self.first = Reversed(), nn.Linear(1, 4).double()
        self.layer, self.body = Padded(4, 6, batch_first=True).double(), _body(6, 4)
        self.error = Transformed()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        past = self.reversed(batch["past"])
        lengths = torch.full((past.shape[0],), past.shape[1])
        hidden = self.layer(self.first(past.unsqueeze(-1)), lengths)
        self.error.transformation = "tanh"
        return self.error(self.reversed(self.body(hidden[:, -1]), back=True), batch["future"])

    validation_step = training_step


class Positions(nn.Module):
    """Makes its table in its first call (an example program of Lightning)."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 8, dtype=torch.float64)
        return x + self.table[: x.shape[1]]


class Cached(Scaled):
    """A table that one stage has when the validation is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.positions, self.after = _body(8, 6), Positions(), _body(6, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self.after(self.positions(self.before(batch["past"]))), batch["future"])

    validation_step = training_step


class Transformed(Metric):
    """A metric with an option that is not there before the step sets it."""

    full_state_update = False
    transformation: str

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predicted: torch.Tensor, target: torch.Tensor) -> None:
        error = (predicted - target).square().mean(1)
        self.total = self.total + (torch.tanh(error) if self.transformation == "tanh" else error).sum()
        self.count = self.count + len(error)

    def compute(self) -> torch.Tensor:
        return self.total / self.count


class Shown(Scaled):
    """Logs a metric object for the progress bar (scvi-tools)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.likelihood(batch).mean()
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True, prog_bar=True)
        return loss


class Bar(ProgressBar):
    """Reads metrics at the end of an epoch, on the first rank only, and a hook of another callback follows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def disable(self) -> None:
        pass

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.seen.append(self.get_metrics(trainer, pl_module))


class Norms(L.Callback):
    """Reads all parameters at the end of an epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.norm = sum(float(parameter.norm()) for parameter in pl_module.parameters())


class Timed(Scaled):
    """Returns the time (GraphGym of PyTorch Geometric)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.likelihood(batch).mean(), "ended": time.time()}


MODULES = {kind.__name__: kind for kind in (Scaled, Columns, Rates, Channels, Recurrent, Cached)}


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


def _shown(strategy: bool) -> tuple[list[dict[str, Any]], float]:
    torch.manual_seed(0)
    chosen: Any = PipelineStrategy(stages=2, microbatches=2) if strategy else "auto"
    bar, norms = Bar(), Norms()
    options = {"callbacks": [bar, norms], "enable_progress_bar": True}
    run_fit(Shown(), Shown.loader(), Shown.loader(), chosen, 2 if strategy else 1, **options)
    return bar.seen, norms.norm


@pytest.mark.slow
def test_progress_bars_of_others_read_metrics_on_the_first_rank_only() -> None:
    (expected, norm), answers = _shown(False), run_ranks(2, _shown, True, timeout=240)
    assert [len(seen) for seen, _ in answers] == [2, 0]
    for got, wanted in zip(answers[0][0], expected):
        assert got["mean"] == pytest.approx(wanted["mean"], rel=1e-6)
    assert all(got == pytest.approx(norm, rel=1e-9) for _, got in answers)


def _timed() -> str:
    try:
        run_fit(Timed(), Timed.loader(), Timed.loader(), PipelineStrategy(stages=2, microbatches=2), 2)
    except PipepartError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.slow
def test_a_clock_in_the_result_of_a_step_is_refused_by_name() -> None:
    for answer in run_ranks(2, _timed, timeout=240):
        assert "the step returns ['ended']" in answer and "a clock" in answer
