"""What a replica that may be lost refuses by name, before its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from watching import QUIET

from pipepart.cli.replica_member import ReplicaMember
from pipepart.errors import ConfigError, PlanError
from pipepart.lightning.replica_strategy import ReplicaPlace, ReplicaStrategy


class _Module(L.LightningModule):
    def __init__(self, loss: str = "mean") -> None:
        super().__init__()
        self.net, self.kind = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        squares = self.net(batch[0]).square()
        return squares.mean() if self.kind == "mean" else squares.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Manual(_Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Backward(_Module):
    def backward(self, loss: torch.Tensor, *args: Any) -> None:
        loss.backward()


class _Second(_Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class _Stream(IterableDataset[tuple[torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(3),)] * 8)


ROWS = TensorDataset(torch.randn(16, 3))
CASES: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "manual": (_Manual, {}, ROWS, "not for manual optimization"),
    "backward": (_Backward, {}, ROWS, "not for _Backward.backward: change gradients in on_after_backward"),
    "overfit": (_Module, {"overfit_batches": 1}, ROWS, "not for trainer.overfit_batches"),
    "time": (_Module, {"max_time": "00:00:01:00"}, ROWS, "not for trainer.max_time"),
    "sampler": (_Module, {"use_distributed_sampler": False}, ROWS, "not for use_distributed_sampler=False"),
    "stream": (_Module, {}, _Stream(), "not for streams of training data"),
    "lbfgs": (_Second, {}, ROWS, "not for LBFGS"),
    "sum": (lambda: _Module("sum"), {}, ROWS, "has none, or several"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(tmp_path: Path, case: str) -> None:
    made, options, data, text = CASES[case]
    strategy = ReplicaStrategy(ReplicaPlace(tmp_path, (0, 0), 2), stages=1, replicas=1, microbatches=2)
    strategy.as_written = False
    own = {
        **QUIET,
        "use_distributed_sampler": True,
        "default_root_dir": tmp_path,
        "max_steps": 2,
        "limit_val_batches": 0,
        **options,
    }
    trainer = L.Trainer(strategy=strategy, devices=1, **own)
    trainer.callbacks.append(ReplicaMember(strategy))  # type: ignore[attr-defined]
    with pytest.raises((ConfigError, PlanError), match=text):
        trainer.fit(made(), DataLoader(data, 4))
