"""Steps that fill variables outside of the module, and set `trainer.should_stop`: equal to one process on every rank."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from stateful import Auto, loaders
from support.ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset
from watching import QUIET, assert_same_run, run_fit

from pipepart import PipelineStrategy

SEEN: list[Any] = []


def _filling() -> tuple[L.LightningModule, list[int], dict[str, list[float]]]:
    """A module whose steps fill variables of an enclosing function, and a global one."""
    epochs: list[int] = []
    losses: dict[str, list[float]] = defaultdict(list)

    class Filling(Auto):
        def training_step(self, batch, batch_idx):
            loss, _ = self.losses(batch)
            losses["train"].append(loss.item())
            SEEN.append(self.global_step)
            return loss

        def validation_step(self, batch, batch_idx):
            if not self.trainer.sanity_checking:
                epochs.append(self.current_epoch)
            self.log("val", self.losses(batch)[0])

    return Filling(), epochs, losses


class Stopping(Auto):
    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            self.trainer.should_stop = True
        return self.losses(batch)[0]

    def validation_step(self, batch, batch_idx):
        self.log("val", self.losses(batch)[0])


def _run(pipeline: bool) -> dict[str, Any]:
    found = {}
    for name in ("filling", "stopping"):
        SEEN.clear()
        module, epochs, losses = _filling() if name == "filling" else (Stopping(), [], {})
        strategy: Any = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
        found[name] = run_fit(module, *loaders(), strategy, 2 if pipeline else 1, max_epochs=4)
        found[name]["variables"] = list(epochs), dict(losses), list(SEEN)
    return found


@pytest.mark.slow
def test_equal_to_one_process() -> None:
    expected = _run(False)
    assert expected["stopping"]["step"] < 8
    for rank, answer in enumerate(run_ranks(2, _run, True)):
        for name, wanted in expected.items():
            assert_same_run(answer[name], wanted, f"{name} on rank {rank}")
            epochs, losses, steps = answer[name]["variables"]
            assert (epochs, steps) == (wanted["variables"][0], wanted["variables"][2]), f"{name} on rank {rank}"
            assert losses.keys() == wanted["variables"][1].keys()
            for key, values in wanted["variables"][1].items():
                assert losses[key] == pytest.approx(values, rel=1e-8)


class Growing(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        torch.manual_seed(3)
        data = TensorDataset(torch.randn(64, 6, dtype=torch.float64), torch.randn(64, 4, dtype=torch.float64))
        return DataLoader(data, batch_size=self.batch_size)

    val_dataloader = train_dataloader

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 8:
            raise RuntimeError("CUDA out of memory.")
        return self.losses(batch)[0]


@pytest.mark.slow
def test_a_batch_size_is_found_in_one_process() -> None:
    found = []
    for strategy in ("auto", PipelineStrategy(stages=1)):
        module = Growing()
        finder = BatchSizeFinder(init_val=2, steps_per_trial=1, max_trials=4)
        L.Trainer(strategy=strategy, devices=1, max_steps=1, limit_val_batches=0, callbacks=[finder], **QUIET).fit(
            module
        )
        found.append(module.batch_size)
    assert found[0] == found[1] == 8


class Positions:
    """A loader whose state is the batch that it gave last."""

    def __init__(self) -> None:
        self.index = 0

    def __iter__(self) -> Any:
        for number in range(self.index, 6):
            self.index = number
            yield torch.full((4, 6), float(number), dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"] + 1


def test_planning_leaves_a_loader_where_it_was() -> None:
    found = []
    for strategy in ("auto", PipelineStrategy(stages=1, microbatches=2)):
        module, _, losses = _filling()
        L.Trainer(strategy=strategy, devices=1, max_steps=2, limit_val_batches=0, **QUIET).fit(module, Positions())
        found.append(losses["train"])
    assert found[1] == pytest.approx(found[0], rel=1e-8)
