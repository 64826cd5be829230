"""Samples that meet, under the Trainer: weights, buffers and logged values are those of plain Lightning on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from support.mixers import MIXERS, VQVAE
from support.ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

MODELS = {**MIXERS, "vqvae": VQVAE}


class Module(L.LightningModule):
    """Logs its loss, a function of it, and its last embedding size; evaluates with the same loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS[name]()
        self.logged: list[dict[str, float]] = []

    def _values(self, batch: Any) -> dict[str, torch.Tensor]:
        result = self.model(*batch)
        return result if isinstance(result, dict) else {"loss": result}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        values = self._values(batch)
        self.log_dict({f"train_{key}": value for key, value in values.items()})
        self.log("perplexity", values["loss"].detach().clamp(max=5).exp())
        return values["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({f"val_{key}": value for key, value in self._values(batch).items()})

    def on_train_batch_end(self, *args: Any) -> None:
        self.logged.append(
            {key: float(value) for key, value in self.trainer.callback_metrics.items() if "val" not in key}
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _fit(name: str, devices: int, strategy: Any, **options: Any):
    module = Module(name)
    torch.manual_seed(5)
    options = {"precision": "64-true", "max_epochs": 1, **options}
    exact = options["precision"] == "64-true"
    data = TensorDataset(*(t.double() if exact and t.is_floating_point() else t for t in module.model.batch(27)))
    loader = DataLoader(data, batch_size=8)  # the last batch has 3 samples
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    runtime = getattr(trainer.strategy, "runtime", None)
    state = module.state_dict() if runtime is None else runtime.full_state_dict()
    return {key: value.clone() for key, value in state.items()}, module.logged, metrics


def _pipeline(name: str, stages: int, options: dict[str, Any]):
    from pipepart import PipelineStrategy

    return _fit(name, stages, PipelineStrategy(stages=stages, microbatches=4), **options)


@cache
def _plain(name: str, **options: Any):
    """Plain Lightning on one device, for all numbers of stages."""
    return _fit(name, 1, "auto", **options)


def _check(name: str, stages: int, tolerance: float = 1e-9, **options: Any) -> None:
    state, logged, metrics = _plain(name, **options)
    answers = run_ranks(stages, _pipeline, name, stages, options)
    for key, value in state.items():
        assert torch.allclose(answers[0][0][key], value, rtol=tolerance, atol=tolerance), key
    for _, seen, found in answers:
        for got, wanted in zip(seen, logged, strict=True):
            assert got == pytest.approx(wanted, rel=tolerance)
        assert found == pytest.approx(metrics, rel=tolerance)


QUICK = {("simclr", 2)}


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(name, stages, marks=[] if (name, stages) in QUICK else [pytest.mark.slow])
        for name in ("simclr", "clip", "barlow_twins", "vicreg", "vqvae")
        for stages in (2, 3)
    ],
)
def test_weights_and_logs_equal_plain_lightning(name: str, stages: int) -> None:
    _check(name, stages)


@pytest.mark.slow
def test_accumulated_batches() -> None:
    _check("clip", 2, accumulate_grad_batches=2)


@pytest.mark.slow
def test_in_mixed_precision() -> None:
    _check("simclr", 2, tolerance=0.05, precision="bf16-mixed")
