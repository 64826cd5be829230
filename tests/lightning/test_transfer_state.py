"""Hooks around the transfer of a batch that read or change Python state: planning runs them before the run begins."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from stateful import Auto
from torch.utils.data import DataLoader, TensorDataset
from watching import QUIET, Notes

from pipepart import PipelineStrategy

LEVEL = 1.0


def _data(shuffle: bool) -> DataLoader:
    drawn = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, width, generator=drawn, dtype=torch.float64) for width in (6, 4))
    return DataLoader(TensorDataset(x, y), 8, shuffle=shuffle, generator=torch.Generator().manual_seed(2))


class Data(L.LightningDataModule):
    """Scales batches by a number, a tensor and an entry that hooks of the module set; counts its calls."""

    shuffle = False

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift, self.options = 1.0, torch.zeros(6, dtype=torch.float64), {"gain": 1.0}
        self.calls, self.seen, self.mean = 0, list[int](), torch.zeros(6, dtype=torch.float64)

    def train_dataloader(self) -> DataLoader:
        return _data(self.shuffle)

    def val_dataloader(self) -> DataLoader:
        return _data(False)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        self.seen.append(self.calls)
        self.mean.mul_(0.5).add_(batch[0].mean(0))
        x, y = batch
        return [x * self.scale * self.options["gain"] * LEVEL * (1 + 0.1 * self.calls) + self.shift + self.mean, y]


class Unchanged(Auto):
    pass


class Scaled(Auto):
    def on_train_epoch_start(self) -> None:
        self.trainer.datamodule.scale *= 0.5


class Shifted(Auto):
    def on_train_start(self) -> None:
        self.trainer.datamodule.shift += 0.5


class Gained(Auto):
    def on_fit_start(self) -> None:
        self.trainer.datamodule.options["gain"] = 3.0


class OfTheFile(Auto):
    def on_train_epoch_start(self) -> None:
        global LEVEL
        LEVEL = 2.0 + self.current_epoch


class Shuffled(Auto):
    pass


class Validated(Auto):
    """The sanity check uses the hooks between planning and the first batch."""


def _fit(kind: type[Auto], strategy: Any) -> Any:
    global LEVEL
    LEVEL = 1.0
    module, data, notes = kind(), Data(), Notes()
    data.shuffle = kind is Shuffled
    options: dict[str, Any] = {"limit_val_batches": int(kind is Validated), **QUIET}
    L.Trainer(strategy=strategy, devices=1, max_epochs=2, callbacks=[notes], **options).fit(module, datamodule=data)
    return notes.losses, data.calls, data.seen, module.state_dict()


@pytest.mark.parametrize("kind", [Unchanged, Scaled, Shifted, Gained, OfTheFile, Shuffled, Validated])
def test_equal_to_one_device(kind: type[Auto]) -> None:
    losses, calls, seen, state = _fit(kind, PipelineStrategy(stages=1, microbatches=2))
    expected = _fit(kind, "auto")
    assert losses == pytest.approx(expected[0], rel=1e-10)
    assert (calls, seen) == expected[1:3]
    torch.testing.assert_close(state, expected[3], rtol=1e-10, atol=1e-12)
