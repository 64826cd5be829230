"""Where the time of a step goes, under the Trainer: the account adds up to the steps of a run with naps in known places."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.profilers import SimpleProfiler
from support.lightning_modules import Module, loader
from support.ranks import run_ranks

from pipepart import PipelineStrategy
from pipepart.lightning.monitor import PipelineMonitor
from pipepart.report.account import load_account

QUIET = {
    "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    "logger": False,
}  # fmt: skip
NAP = 0.05


class _Naps(L.Callback):
    """A callback that takes its time after each batch."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.begun.append(time.perf_counter())

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(NAP)


class _Slow(Module):
    """A module whose update takes its time."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["optimizer"].register_step_pre_hook(lambda *_: time.sleep(NAP))
        return found


def _account(folder: str, stages: int, slow_data: bool) -> Any:
    data: Any = loader("mlp", 160, 8)
    if slow_data:
        inner = data.collate_fn

        def collate(samples: Any) -> Any:
            time.sleep(NAP)
            return inner(samples)

        data.collate_fn = collate
    naps = _Naps()
    strategy = PipelineStrategy(stages=stages, microbatches=2, schedule="1f1b")
    trainer = L.Trainer(
        strategy=strategy, devices=stages, max_epochs=1, callbacks=[naps, PipelineMonitor(4, Path(folder) / "run")],
        use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    trainer.fit(_Slow("mlp"), data)
    return strategy.account, max(b - a for a, b in zip(naps.begun, naps.begun[2:]))


@pytest.mark.parametrize("slow_data", [False, True])
def test_one_stage(tmp_path, slow_data):
    account, longest = _account(str(tmp_path), 1, slow_data)
    _check(account, longest, slow_data)
    assert account.alternatives == ()
    assert load_account(tmp_path / "run" / "account.json") == account


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_stages(tmp_path):
    (account, longest), (other, _) = run_ranks(2, _account, str(tmp_path), 2, True, timeout=240)
    _check(account, longest, True)
    assert other is None  # only rank 0 says it
    assert len(account.alternatives) == 2
    assert account.advice


def _check(account: Any, longest: float, slow_data: bool) -> None:
    """`longest`: the longest time of two neighbouring steps, between which every step of the account lies."""
    assert sum(part.seconds for part in account.parts) == pytest.approx(account.step)
    assert account.step <= longest
    assert account.seconds("optimizer") >= NAP
    assert account.seconds("trainer") >= NAP
    assert account.seconds("input") >= NAP or not slow_data
    assert account.seconds("compute") > 0


def test_the_profiler_of_the_user_is_listened_to_and_restored(tmp_path):
    profiler = SimpleProfiler()
    strategy = PipelineStrategy(stages=1, microbatches=2)
    trainer = L.Trainer(strategy=strategy, devices=1, max_steps=6, profiler=profiler, **QUIET)
    trainer.fit(Module("mlp"), loader("mlp", 64, 8))
    assert strategy.account is not None
    assert len(profiler.recorded_durations["run_training_batch"]) == 6
    assert "start" not in vars(profiler)
    assert "stop" not in vars(profiler)


def test_a_run_without_a_traced_step_says_so(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("pipepart.lightning.pipeline_strategy.tell", said.append)
    strategy = PipelineStrategy(stages=1, microbatches=2)
    L.Trainer(strategy=strategy, devices=1, max_steps=2, **QUIET).fit(Module("mlp"), loader("mlp", 64, 8))
    assert strategy.account is None
    assert "is not known" in said[-1]
