"""Notebooks: ranks are forks of the running process, which gets the results and the trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from realistic import Boring, build
from watching import QUIET

from pipepart import NotebookStrategy
from pipepart.errors import ConfigError, PipepartError


class Predicting(Boring):
    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch))
        self.log("loss", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        return {"y": self(batch)}


class Failing(Predicting):
    def on_train_batch_end(self, *args):
        if self.trainer.strategy.global_rank == 1:
            raise ValueError("no more paper")


def _run(strategy: Any, devices: int, folder: Path) -> dict[str, Any]:
    _, train, val = build("boring")
    torch.manual_seed(0)
    module = Predicting().double()
    parameters = list(module.parameters())
    saving = ModelCheckpoint(folder, monitor="x", save_last=True)
    options = {**QUIET, "enable_checkpointing": True, "callbacks": [saving]}
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=2, **options)
    trainer.fit(module, train, val)
    fitted = {
        **module.state_dict(),
        "loss": trainer.callback_metrics["loss"],
        "score": saving.best_model_score,
        "best": Path(saving.best_model_path).name,
        "steps": (trainer.global_step, trainer.current_epoch, trainer.state.status),
    }
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    tested = trainer.test(module, val, ckpt_path="best", verbose=False)
    predicted = trainer.predict(module, val)
    assert devices == 1 or not torch.distributed.is_initialized(), "the ranks are other processes"
    return {"fitted": fitted, "tested": tested, "predicted": [part["y"] for part in predicted]}


@pytest.mark.slow
def test_equal_to_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch.trainer.connectors.accelerator_connector as connector

    expected = _run("auto", 1, tmp_path / "one")
    monkeypatch.setattr(connector, "_IS_INTERACTIVE", True)
    found = _run(NotebookStrategy(stages=2, microbatches=3, split_at=["layer.2"]), 2, tmp_path / "two")
    for key, value in expected["fitted"].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found["fitted"][key], value, rtol=1e-9, atol=1e-12)
        else:
            assert found["fitted"][key] == value
    assert found["tested"][0] == pytest.approx(expected["tested"][0], rel=1e-9)
    for one, other in zip(found["predicted"], expected["predicted"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_an_error_of_a_rank_ends_all_and_is_shown() -> None:
    _, train, _ = build("boring")
    trainer = L.Trainer(strategy="pipepart_notebook", devices=2, max_epochs=1, **QUIET)
    with pytest.raises(Exception, match="no more paper"):
        trainer.fit(Failing().double(), train)
    assert not trainer.strategy.launcher._processes


def test_a_second_fit_is_refused() -> None:
    trainer = L.Trainer(strategy=NotebookStrategy(stages=2), devices=2, **QUIET)
    trainer.strategy.launcher._fitted = True
    _, train, _ = build("boring")
    with pytest.raises(ConfigError, match="Make a new Trainer"):
        trainer.fit(Predicting().double(), train)


def test_a_strategy_for_scripts_names_the_one_for_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch.trainer.connectors.accelerator_connector as connector

    from pipepart import PipelineStrategy

    monkeypatch.setattr(connector, "_IS_INTERACTIVE", True)
    with pytest.raises(PipepartError, match="pipepart_notebook"):
        L.Trainer(strategy=PipelineStrategy(stages=2), devices=2, **QUIET)
