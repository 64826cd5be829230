"""What ranks exchange and save is in host memory: no rank gets tensors on the device of another one."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.lightning.optimizers import load_full_optimizer_state
from pipepart.lightning.sharded import load_rest


def test_the_rest_of_a_sharded_checkpoint_is_read_into_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # as rank 0 of a job on GPUs writes it
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"state_dict": {}, "callbacks": {"own": torch.arange(3.0)}}, tmp_path / "rest.pt")
    found = load_rest(tmp_path, None)["callbacks"]["own"]
    assert found.device.type == "cpu" and found.tolist() == [0.0, 1.0, 2.0]


def test_states_are_copied_and_only_for_parameters_of_this_rank() -> None:
    def state(device: str) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.ones(3, device=device))
        return parameter, torch.optim.Adam([parameter])

    saved, optimizer = state("cpu")
    saved.grad = torch.ones(3)
    optimizer.step()
    own, loaded = state("cpu")
    load_full_optimizer_state(loaded, optimizer.state_dict())
    assert loaded.state[own]["exp_avg"].data_ptr() != optimizer.state[saved]["exp_avg"].data_ptr()
    assert torch.equal(loaded.state[own]["exp_avg"], optimizer.state[saved]["exp_avg"])
    other, elsewhere = state("meta")
    load_full_optimizer_state(elsewhere, optimizer.state_dict())
    assert not elsewhere.state.get(other), "states of parameters of other stages are not loaded"


class Wrapped(L.LightningModule):
    """Its hook changes the structure of a batch: it must run once for each batch, on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 1).double()
        self.losses: list[float] = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"rows": 2 * batch}

    def _loss(self, batch):
        return self.second(torch.relu(self.first(batch["rows"]))).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val", self._loss(batch))

    def on_train_batch_end(self, outputs, *args):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _fit(pipeline: bool) -> list[float]:
    module = Wrapped()
    rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b") if pipeline else "auto"
    trainer = L.Trainer(strategy=strategy, devices=2 if pipeline else 1, max_epochs=1, **QUIET)

    trainer.fit(module, DataLoader(rows, 8), DataLoader(rows, 8))
    return [*module.losses, float(trainer.callback_metrics["val"])]


@pytest.mark.slow
def test_a_hook_runs_once_for_a_batch_that_another_rank_has_read() -> None:
    expected = _fit(False)
    for losses in run_ranks(2, _fit, True):
        assert losses == pytest.approx(expected, rel=1e-9)
