"""Training steps that return None for some batches, to skip them: equal to one process, or refused by name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from stateful import Auto, loaders
from support.ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset
from watching import QUIET, assert_same_state

from pipepart import PipelineStrategy
from pipepart.errors import PipepartError


class Skipping(Auto):
    """Logs every loss, and returns those of the batches that are kept."""

    def keeps(self, batch_idx: Any) -> bool:
        return batch_idx % 2 == 0

    def training_step(self, batch, batch_idx):
        loss, _ = self.losses(batch)
        self.log("loss", loss)
        return loss if self.keeps(batch_idx) else None

    def validation_step(self, batch, batch_idx):
        self.log("val", self.losses(batch)[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class FirstSkipped(Skipping):
    def keeps(self, batch_idx):
        return batch_idx % 2 == 1


class AllSkipped(Skipping):
    def keeps(self, batch_idx):
        return False


_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "second": (Skipping, {}),
    "first": (FirstSkipped, {}),
    "all": (AllSkipped, {}),
    "accumulated": (Skipping, {"accumulate_grad_batches": 2}),
    "accumulated, first": (FirstSkipped, {"accumulate_grad_batches": 2}),
}


class _Seen(Callback):
    def __init__(self) -> None:
        self.losses: list[float | None] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = (outputs or {}).get("loss")
        self.losses.append(None if loss is None else float(loss))


def _data() -> DataLoader[Any]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(24, 6, dtype=torch.float64), torch.randn(24, 4, dtype=torch.float64))
    return DataLoader(data, batch_size=6)


def _fit(names: list[str], pipeline: bool) -> dict[str, Any]:
    found = {}
    for name in names:
        make, options = _CASES[name]
        seen = _Seen()
        strategy: Any = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
        trainer = L.Trainer(
            strategy=strategy, devices=2 if pipeline else 1, max_epochs=2, callbacks=[seen], **{**QUIET, **options}
        )
        trainer.fit(make(), _data(), _data())
        state = {key: value.clone() for key, value in trainer.strategy.lightning_module_state_dict().items()}
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found[name] = {"state": state, "losses": seen.losses, "metrics": metrics, "step": trainer.global_step}
    return found


@pytest.mark.slow
def test_equal_to_one_process() -> None:
    names = list(_CASES)
    expected, answers = _fit(names, False), run_ranks(2, _fit, names, True)
    for name in names:
        for rank, answer in enumerate(answers):
            got, wanted = answer[name], expected[name]
            assert [v is None for v in got["losses"]] == [v is None for v in wanted["losses"]], f"{name} on rank {rank}"
            assert [v for v in got["losses"] if v is not None] == pytest.approx(
                [v for v in wanted["losses"] if v is not None], rel=1e-8
            )
            assert got["metrics"] == pytest.approx(wanted["metrics"], rel=1e-6), name
            assert got["step"] == wanted["step"]
        assert_same_state(answers[0][name]["state"], expected[name]["state"], name)


def _with_replicas() -> str:
    strategy = PipelineStrategy(stages=1, replicas=2, microbatches=2)
    try:
        L.Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET).fit(Skipping(), *loaders())
    except PipepartError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.slow
def test_replicas_are_refused_by_name() -> None:
    for words in run_ranks(2, _with_replicas):
        assert "returned None to skip a batch, and there are 2 replicas" in words
