"""Batches of an evaluation run in a series, and everything that a user sees is that of one batch after the other."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from support.lightning_modules import Module, loader
from support.ranks import RanksFailed, run_ranks
from torch.utils.data import DataLoader, IterableDataset

from pipepart import PipelineStrategy
from pipepart.runtime.series import Series


class Evaluated(Module):
    """Logs a mean and a metric, keeps a list, draws random numbers, and returns what it has computed."""

    def __init__(self, name: str = "gpt") -> None:
        super().__init__(name)
        self.double()
        self.mean = torchmetrics.MeanMetric()
        self.losses: list[torch.Tensor] = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.model(*batch)
        self.mean(loss)
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self.log("val_mean", self.mean)
        self.log("index", float(batch_idx))
        self.losses.append(loss)

    def on_validation_epoch_end(self):
        self.log("epoch_mean", torch.stack(self.losses).mean())
        self.losses.clear()

    def predict_step(self, batch, batch_idx):
        return {"loss": self.model(*batch), "index": batch_idx, "first": batch[0][:, 0]}


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert torch.equal(prediction["first"], batch[0][:, 0])
        self.written.append((batch_idx, batch_indices, prediction["index"], float(prediction["loss"])))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.written.append(len(predictions))


class UnderWay:
    """The numbers of batches that were under way after each run of a series."""

    def __enter__(self) -> list[int]:
        self.found, self.before = [], Series.run

        def noted(series: Series, *args: Any) -> int:
            ran = self.before(series, *args)
            self.found.append(series.under_way)
            return ran

        Series.run = noted
        return self.found

    def __exit__(self, *error: object) -> None:
        Series.run = self.before


def _trainer(pipeline: bool, devices: int, chunks: int = 1) -> L.Trainer:
    options: Any = {"schedule": "1f1b" if chunks == 1 else "interleaved", "chunks": chunks}
    strategy: Any = PipelineStrategy(stages=2, microbatches=4, **options) if pipeline else "auto"
    return L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1, callbacks=[Writer()],
        use_distributed_sampler=False,
    )  # fmt: skip


def _runs(pipeline: bool, devices: int, chunks: int = 1) -> dict[str, Any]:
    module, data = Evaluated(), loader("gpt", 77, 6)  # 13 batches, the last of 5 samples
    trainer = _trainer(pipeline, devices, chunks)
    with UnderWay() as counts:
        trainer.fit(module, loader("gpt", 12, 6), [data, loader("gpt", 20, 4, seed=7)])
        fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
        validated = trainer.validate(module, data, verbose=False)
        predicted = trainer.predict(module, data)
    values = [(float(p["loss"]), p["index"], p["first"]) for p in predicted]
    return {
        "fitted": fitted,
        "validated": validated,
        "predicted": values,
        "written": trainer.callbacks[-1].written,
        "counts": counts,
    }


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_equal_to_one_device(chunks: int) -> None:
    """With two chunks on each stage, several batches run with one list of actions."""
    expected = _runs(False, 1)
    for rank, answer in enumerate(run_ranks(2, _runs, True, 2, chunks, timeout=300)):
        assert answer["fitted"] == pytest.approx(expected["fitted"], abs=1e-9), rank
        assert answer["validated"][0] == pytest.approx(expected["validated"][0], abs=1e-9), rank
        assert len(answer["predicted"]) == len(expected["predicted"]) == 13
        for mine, theirs in zip(answer["predicted"], expected["predicted"]):
            assert mine[:2] == pytest.approx(theirs[:2], abs=1e-9)
            assert torch.equal(mine[2], theirs[2])
        assert answer["written"][-1] == expected["written"][-1]
        for mine, theirs in zip(answer["written"][:-1], expected["written"][:-1], strict=True):
            assert mine[:3] == theirs[:3]
            assert mine[3] == pytest.approx(theirs[3], abs=1e-9)
        if chunks == 1:
            assert max(answer["counts"]) == 3  # the batch whose results are taken next, and two ahead
            # full from the first batch of 13 to the last
            assert answer["counts"][-15:] == [1, 2, *[3] * 11, 2, 1]
        else:
            assert max(answer["counts"]) == 13


class Rows(IterableDataset):
    def __iter__(self):
        return iter(list(loader("gpt", 30, 6).dataset))


class Looks(L.Callback):
    """Code of the user between two batches, which may change what the next one computes."""

    def on_predict_batch_end(self, trainer, module, *args):
        with torch.no_grad():
            module.scale.mul_(2.0)


class Scaled(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float64))
        self.skips = 0

    def predict_step(self, batch, batch_idx):
        if batch_idx == 2:  # a recording of its own
            return {"loss": self.model(*batch) * 3.0}
        return {"loss": self.model(*batch) * self.scale}


class Counts(Scaled):
    """What a step keeps is read by the next one."""

    def predict_step(self, batch, batch_idx):
        self.skips += 1
        return {"loss": self.model(*batch) * self.skips}


class Unnumbered(Evaluated):
    def predict_step(self, batch):
        return {"loss": self.model(*batch)}


def _others(pipeline: bool, devices: int) -> list[Any]:
    answers = []
    for kind, data, callbacks in (
        (Scaled, DataLoader(Rows(), batch_size=6), []),
        (Scaled, loader("gpt", 30, 6), [Looks()]),
        (Counts, loader("gpt", 30, 6), []),
        (Unnumbered, loader("gpt", 30, 6), []),
    ):
        trainer = _trainer(pipeline, devices)
        trainer.callbacks = callbacks
        with UnderWay() as counts:
            predicted = trainer.predict(kind(), data)
        answers.append(([float(p["loss"]) for p in predicted], counts))
    return answers


@pytest.mark.slow
def test_streams_and_code_between_batches() -> None:
    """Streams end together; a step that is recorded again ends a series; code between batches keeps them apart."""
    expected = _others(False, 1)
    for answer in run_ranks(2, _others, True, 2, timeout=300):
        for (mine, _), (theirs, _) in zip(answer, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9)
        streams, hooked, counting, unnumbered = (counts for _, counts in answer)
        assert max(streams) == 2, "the third batch has a recording of its own"
        assert not hooked
        assert not counting
        assert not unnumbered


def _failing(devices: int) -> Any:
    x, y = loader("gpt", 30, 6).dataset.tensors
    x = x.clone()
    x[27] = 4_000  # in the last batch
    trainer = _trainer(True, devices)
    return trainer.predict(Evaluated(), DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6))


@pytest.mark.slow
def test_an_error_in_a_later_batch_of_a_series_ends_all_ranks() -> None:
    with pytest.raises(RanksFailed, match="index out of range"):
        run_ranks(2, _failing, 2, timeout=240)
