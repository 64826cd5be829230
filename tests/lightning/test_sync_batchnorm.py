"""`sync_batchnorm=True`: batch norm over the replicas, equal to one process on the batches of all replicas."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support.ranks import error_of, run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET, MicrobatchesByHand

from pipepart import PipelineStrategy
from pipepart.errors import ConfigError
from pipepart.lightning.refusals import check_module


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.BatchNorm1d(6), nn.Linear(6, 12), nn.BatchNorm1d(12, momentum=None), nn.Tanh(), nn.Unflatten(1, (3, 2, 2)),
            nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 1),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True).sin())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Late(Net):
    """Needs what a hook sets when the training starts: it is planned after its set-up."""

    def on_train_start(self):
        self.weight = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.weight


def _batches(replica: int | None, microbatches: int, sizes: tuple[int, ...] = (6, 6, 4)) -> list[torch.Tensor]:
    """The batches of one replica; None: those of both, micro-batch by micro-batch."""
    torch.manual_seed(1)
    found = [[torch.randn(size, 6, dtype=torch.float64) * (1 + r) + r for size in sizes] for r in range(2)]
    if replica is not None:
        return found[replica]
    parts = [[batch.tensor_split(microbatches) for batch in one] for one in found]
    return [torch.cat([part for pair in zip(*both) for part in pair]) for both in zip(*parts)]


def _fit(
    strategy: Any, devices: int, batches: list[torch.Tensor], kind: type[Net] = Net, **options: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    module = kind().double()
    L.Trainer(strategy=strategy, devices=devices, max_epochs=2, **options, **QUIET).fit(
        module, DataLoader(batches, batch_size=None)
    )
    return module.state_dict()


def _ranks(microbatches: int, batch_norm: str, uneven: bool = False, kind: type[Net] = Net) -> Any:
    replica = torch.distributed.get_rank() // 2
    strategy = PipelineStrategy(stages=2, microbatches=microbatches, batch_norm=batch_norm, split_at=["net.4"])
    batches = _batches(replica, microbatches, (6, 6, 1 if replica and uneven else 4))
    if uneven:
        return error_of(lambda: _fit(strategy, 4, batches, sync_batchnorm=True))
    return _fit(strategy, 4, batches, kind, sync_batchnorm=True)


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "batch_norm"), [(1, "microbatch"), (2, "batch")])
def test_equal_to_one_process_on_the_batches_of_all_replicas(microbatches: int, batch_norm: str) -> None:
    by_hand = MicrobatchesByHand(microbatches) if microbatches > 1 else "auto"
    expected = _fit(by_hand, 1, _batches(None, microbatches))
    whole = _fit("auto", 1, _batches(None, microbatches)) if batch_norm == "batch" else expected
    for found in run_ranks(4, _ranks, microbatches, batch_norm):
        for name, value in expected.items():
            counted = batch_norm == "batch" and ("running" in name or "tracked" in name)
            # Normalised by micro-batch, counted by batch: the statistics of the first layer do not depend on training.
            value = whole[name] if counted else value
            if not counted or name.startswith("net.0."):
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_plan_that_is_made_after_set_up() -> None:
    expected = _fit("auto", 1, _batches(None, 1))
    for found in run_ranks(4, _ranks, 1, "microbatch", kind=Late):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_replicas_with_different_numbers_of_micro_batches_are_refused() -> None:
    for found in run_ranks(4, _ranks, 2, "microbatch", True):
        assert "the replicas have 2, 1 micro-batches in this step" in found


def test_layers_that_synchronise_themselves_are_refused() -> None:
    module = Net()
    module.net[0] = nn.SyncBatchNorm(6)
    with pytest.raises(ConfigError, match=r"net.0 is a torch.nn.SyncBatchNorm.*sync_batchnorm=True"):
        check_module(module)
