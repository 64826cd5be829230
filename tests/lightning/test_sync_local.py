"""Runs of a Trainer whose replicas make updates of their own: what is evaluated, checkpoints, and the end of training."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from realistic import build
from support.ranks import error_of, run_ranks
from support.reference import assert_close
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.lightning import WeightEMA

LOCAL: dict[str, Any] = {"mode": "local", "every": 3, "outer": "nesterov"}


class Watch(Callback):
    """Keeps the parameters of this replica after each batch, and those that are evaluated."""

    def __init__(self) -> None:
        self.trained: list[dict[str, torch.Tensor]] = []
        self.evaluated: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer, module, *args):
        self.trained.append(_values(module))

    def on_validation_batch_start(self, trainer, module, *args):
        if not trainer.sanity_checking:
            self.evaluated.append(_values(module))


def _values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}


class SaveHalf(Callback):
    """Writes a checkpoint at the end of the first epoch, before the validation or after it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class Waits(Callback):
    """Lets replicas wait for each other now and then, while one of them is slow."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank:
            time.sleep(0.2)
        if batch_idx == 0:
            assert trainer.strategy.broadcast(trainer.global_rank) == 0
            assert float(trainer.strategy.reduce(torch.ones(()), reduce_op="sum")) == 2.0


def _run(folder: str, resume: str | None = None, save: str | None = None, **more: Any) -> dict[str, Any]:
    module, train, val = build("gpt")
    watch = Watch()
    strategy = PipelineStrategy(
        stages=1, microbatches=3, sync=more.pop("sync", LOCAL), sharded=more.pop("sharded", False)
    )
    callbacks = [
        watch,
        *([SaveHalf(save)] if save is not None else []),
        *([Waits()] if more.pop("waits", False) else []),
    ]
    options = {**QUIET, "use_distributed_sampler": True, "default_root_dir": folder, "gradient_clip_val": 0.5, **more}
    trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=callbacks, **options)
    trainer.fit(module, train, val, ckpt_path=resume)
    return {"trained": watch.trained, "evaluated": watch.evaluated, "end": _values(module)}


def _mean(both: list[dict[str, Any]], step: int) -> dict[str, torch.Tensor]:
    first, second = (found["trained"][step] for found in both)
    return {name: (first[name] + second[name]) / 2 for name in first}


def _assert_values(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        assert_close(name, got[name], values)


@pytest.mark.slow
def test_the_mean_is_evaluated_and_left_and_a_checkpoint_continues_in_a_round(tmp_path) -> None:
    path = str(tmp_path / "half.ckpt")
    both = run_ranks(2, _run, str(tmp_path), None, path)
    steps = len(both[0]["trained"])
    half = steps // 2
    assert half % LOCAL["every"] and steps % LOCAL["every"], "both epochs end within a round"
    assert not torch.equal(*(next(iter(found["trained"][half - 1].values())) for found in both))
    for found in both:
        _assert_values(found["evaluated"][0], _mean(both, half - 1))
        _assert_values(found["evaluated"][-1], _mean(both, steps - 1))
        _assert_values(found["end"], _mean(both, steps - 1))
    _assert_values({n: v for n, v in _plain(path).items() if n in both[0]["end"]}, _mean(both, half - 1))
    again = run_ranks(2, _run, str(tmp_path), path)
    for found, whole in zip(again, both):
        assert len(found["trained"]) == steps - half
        for got, wanted in zip(found["trained"], whole["trained"][half:]):
            _assert_values(got, wanted)


@pytest.mark.slow
def test_a_ring_settles_to_evaluate_to_save_and_at_the_end(tmp_path) -> None:
    path = str(tmp_path / "half.ckpt")
    both = run_ranks(2, _run, str(tmp_path), None, path, sync="ring", waits=True)
    again = run_ranks(2, _run, str(tmp_path), path, sync="ring")
    for found in (both, again):
        _assert_values(found[0]["end"], found[1]["end"])
        for first, second in zip(found[0]["evaluated"], found[1]["evaluated"]):
            _assert_values(first, second)
    saved = _plain(path)
    _assert_values({n: v for n, v in saved.items() if n in both[0]["end"]}, both[0]["evaluated"][0])
    assert len(again[0]["trained"]) == len(both[0]["trained"]) // 2
    begin = torch.load(path, weights_only=True)["pipepart_sync"]
    assert begin["mode"] == "ring" and len(begin["replicas"]) == 2 and begin["replicas"][1]["optimizers"]


def _plain(path: str) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def _two_places(every: int) -> dict[str, torch.Tensor]:
    """Train the second stage alone. The first one has no update that could be within a round."""
    module, train, _ = build("boring")
    module.layer[:2].requires_grad_(False)
    strategy = PipelineStrategy(
        stages=2,
        microbatches=2,
        schedule="1f1b",
        split_at=["layer.2"],
        timeout=60,
        sync={"mode": "local", "every": every},
    )
    options = {**QUIET, "use_distributed_sampler": True, "max_steps": 4, "limit_val_batches": 0}
    L.Trainer(strategy=strategy, devices=4, **options).fit(module, train)
    return _values(module)


@pytest.mark.slow
def test_a_stage_that_trains_nothing_is_in_the_round_of_the_others() -> None:
    found = run_ranks(4, _two_places, 3, timeout=150)
    for stage in range(2):
        assert found[stage].keys() == found[2 + stage].keys() and found[stage]
        assert all(torch.equal(values, found[2 + stage][name]) for name, values in found[stage].items())


def _refused(what: str) -> str:
    module, train, _ = build("gpt")
    options: dict[str, Any] = {"callbacks": [WeightEMA(0.5)]} if what == "average" else {"sync_batchnorm": True}
    trainer = L.Trainer(strategy=PipelineStrategy(stages=1, sync="local"), devices=2, max_epochs=1, **QUIET, **options)
    return error_of(lambda: trainer.fit(module, train))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "text"), [("average", "WeightEMA averages"), ("norm", "sync_batchnorm=True makes")])
def test_features_that_need_one_set_of_parameters_are_refused(what: str, text: str) -> None:
    assert all(text in answer for answer in run_ranks(2, _refused, what))
