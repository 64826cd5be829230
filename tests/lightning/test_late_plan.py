"""Steps that need what hooks set when a run starts: planned later than at set-up, and equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from stateful import Auto, loaders
from support.ranks import run_ranks
from watching import QUIET, assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy


class AtFitStart(Auto):
    """Its steps use numbers that hooks set."""

    def on_fit_start(self):
        self.beta = 0.5

    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        self.log("kl", kl.mean())
        return loss * self.beta

    def validation_step(self, batch, batch_idx):
        self.log("val", self.losses(batch)[0] * self.beta)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class AtTrainStart(AtFitStart):
    """The sanity check comes before the number is set."""

    def on_train_start(self):
        self.gamma = 2.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.gamma


class Asserting(AtFitStart):
    """The step expects the rate that a hook has set."""

    def on_train_start(self):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05

    def training_step(self, batch, batch_idx):
        assert self.optimizers().param_groups[0]["lr"] == 0.05
        return super().training_step(batch, batch_idx)


class Evaluated(AtFitStart):
    def on_test_start(self):
        self.delta = 3.0

    def test_step(self, batch, batch_idx):
        self.log("test", self.losses(batch)[0] * self.delta)


class Failing(AtFitStart):
    def on_train_start(self):
        self.started = True

    def training_step(self, batch, batch_idx):
        raise KeyError("the step fails by itself")


_CASES: dict[str, Any] = {"fit start": AtFitStart, "train start": AtTrainStart, "assertion": Asserting}


def _strategy(pipeline: bool) -> dict[str, Any]:
    return {
        "strategy": PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto",
        "devices": 2 if pipeline else 1,
    }


def _fit(names: list[str], pipeline: bool) -> dict[str, Any]:
    return {name: run_fit(_CASES[name](), *loaders(), *_strategy(pipeline).values()) for name in names}


@pytest.mark.slow
def test_equal_to_one_process() -> None:
    names = list(_CASES)
    expected, answers = _fit(names, False), run_ranks(2, _fit, names, True)
    for name in names:
        for rank, answer in enumerate(answers):
            assert_same_run(answer[name], expected[name], f"{name} on rank {rank}")
        assert_same_state(answers[0][name]["state"], expected[name]["state"], name)


def _resumed(folder: str, pipeline: bool) -> dict[str, Any]:
    path = Path(folder) / f"{pipeline}.ckpt"
    options = {**QUIET, **_strategy(pipeline)}
    trainer = L.Trainer(max_epochs=1, **options)
    trainer.fit(AtTrainStart(), *loaders())
    trainer.save_checkpoint(path)
    trainer = L.Trainer(max_epochs=3, **{**QUIET, **_strategy(pipeline)})
    trainer.fit(AtTrainStart(), *loaders(), ckpt_path=path)
    return {key: value.clone() for key, value in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.slow
def test_a_resume_and_its_optimizer(tmp_path: Path) -> None:
    expected = _resumed(str(tmp_path), False)
    assert_same_state(run_ranks(2, _resumed, str(tmp_path), True)[0], expected, "resumed")


def _others(pipeline: bool) -> tuple[Any, str, bool]:
    tested = L.Trainer(**{**QUIET, **_strategy(pipeline)}).test(Evaluated(), loaders()[0], verbose=False)
    module, words = Failing(), "nothing was raised"
    try:
        L.Trainer(max_epochs=1, **{**QUIET, **_strategy(pipeline)}).fit(module, *loaders())
    except KeyError as error:
        words = str(error)
    return tested, words, getattr(module, "started", False)


@pytest.mark.slow
def test_evaluation_and_errors_of_a_step() -> None:
    """An error of a step is raised as it is, with the first batch: hooks of the start have run."""
    expected = _others(False)
    assert expected[1:] == ("'the step fails by itself'", True)
    for answer in run_ranks(2, _others, True):
        assert answer[0][0] == pytest.approx(expected[0][0], rel=1e-6)
        assert answer[1:] == expected[1:]
