"""Runs of a Trainer in the modes of `sync`: equal to one device, with checkpoints that move between modes and shapes."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from realistic import build
from support.ranks import error_of, run_ranks
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.lightning import WeightEMA
from pipepart.lightning.sharded import consolidate

SHAPES = {"1": (1, 1), "1x2": (1, 2), "2x2": (2, 4)}
"""Name -> stages, devices."""


class Losses(Callback):
    """Reads no gradients, so that each replica has those of its share only."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[list[float]] = []
        self.gradients: set[int] = set()

    def on_train_batch_end(self, trainer, module, outputs, *args):
        self.losses.append(float(outputs["loss"]))
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        held = [p for p in module.parameters() if not p.is_meta]
        self.gradients.add(sum(p.grad.numel() for p in held if p.grad is not None))


class Norms(Losses):
    """Reads the gradients of all parameters before the update."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.norms.append(sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None))


def _run(
    shape: str, sync: Any, folder: str, epochs: int, resume: str | None = None, save: str | None = None, **more: Any
) -> dict[str, Any]:
    stages, devices = SHAPES[shape]
    module, train, val = build("gpt")
    notes = more.pop("notes", Losses)()
    strategy = PipelineStrategy(stages=stages, microbatches=3, sync=sync, sharded=more.pop("sharded", False))
    callbacks = [notes, *([WeightEMA(0.5)] if more.pop("average", False) else [])]
    options = {**QUIET, "default_root_dir": folder, "limit_val_batches": 0, "gradient_clip_val": 0.5, **more}
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=epochs, callbacks=callbacks, **options)
    evaluates = options["limit_val_batches"] > 0
    trainer.fit(module, train, val if evaluates else None, ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    if save is not None:
        trainer.save_checkpoint(save)
    own = sum(
        state["exp_avg"].numel() for state in trainer.optimizers[0].state.values() if not state["exp_avg"].is_meta
    )
    whole = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return {
        "losses": notes.losses,
        "rates": notes.rates,
        "gradients": notes.gradients,
        "norms": getattr(notes, "norms", []),
        "step": trainer.global_step,
        "share": own / whole,
        "metrics": metrics,
    }


def _on(shape: str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    devices = SHAPES[shape][1]
    return [_run(shape, *args, **kwargs)] if devices == 1 else run_ranks(devices, _run, shape, *args, **kwargs)


def _assert_equal(got: dict[str, Any], whole: dict[str, Any], first: int = 0) -> None:
    assert got["losses"] == pytest.approx(whole["losses"][first:], rel=1e-8)
    assert got["rates"] == whole["rates"][first:]
    assert got["step"] == whole["step"]


def _saved(path: Any) -> tuple[dict[str, Any], dict[Any, Any], dict[str, Any]]:
    content = torch.load(path, weights_only=True)
    average = content.get("pipepart_weight_ema", {}).get("average", {})
    return content["state_dict"], content["optimizer_states"][0]["state"], average


@pytest.mark.slow
def test_a_checkpoint_moves_between_modes_and_shapes(tmp_path) -> None:
    whole = _run("1", "mean", str(tmp_path), 2)
    saved = {name: str(tmp_path / f"{name}.ckpt") for name in ("plain", "sharded")}
    _run("1", "mean", str(tmp_path), 1, save=saved["plain"], average=True)
    half = _on("2x2", "sharded", str(tmp_path), 1, save=saved["sharded"], average=True)
    assert 0.999 < sum(result["share"] for result in half) < 1.5  # tied weights have a state on each of their stages
    for got, wanted in zip(_saved(saved["sharded"]), _saved(saved["plain"])):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            values = value if isinstance(value, dict) else {"": value}
            for key, tensor in values.items():
                other = got[name][key] if isinstance(value, dict) else got[name]
                assert torch.allclose(torch.as_tensor(other), torch.as_tensor(tensor), rtol=1e-8, atol=1e-10), (
                    name,
                    key,
                )
    _assert_equal(_run("1", "mean", str(tmp_path), 2, saved["sharded"]), whole, 3)
    for result in _on("1x2", "master", str(tmp_path), 2, saved["sharded"]):
        _assert_equal(result, whole, 3)


@pytest.mark.slow
def test_each_rank_writes_the_states_that_it_has(tmp_path) -> None:
    whole = _run("1", "mean", str(tmp_path), 2)
    folder = str(tmp_path / "shards.ckpt")
    both = _on("1x2", "sharded", str(tmp_path), 1, save=folder, sharded=True)
    assert sum(max(result["gradients"]) for result in both) == max(whole["gradients"])
    consolidate(folder, tmp_path / "plain.ckpt")
    _assert_equal(_run("1", "mean", str(tmp_path), 2, str(tmp_path / "plain.ckpt")), whole, 3)
    for result in _on("2x2", "sharded", str(tmp_path), 2, folder, sharded=True):
        _assert_equal(result, whole, 3)


@pytest.mark.slow
def test_replicas_that_keep_shares_write_and_read_all_checkpoints(tmp_path) -> None:
    options = {"limit_val_batches": 2}
    whole = _run("1", "mean", str(tmp_path), 2, **options)
    plain, folder = str(tmp_path / "plain.ckpt"), str(tmp_path / "shards.ckpt")
    half = _on("1x2", "fsdp", str(tmp_path), 1, save=plain, **options)
    assert sum(result["share"] for result in half) == pytest.approx(1.0)
    _assert_equal(_run("1", "mean", str(tmp_path), 2, plain, **options), whole, 3)
    assert whole["metrics"]
    for result in _on("2x2", "fsdp", str(tmp_path), 2, plain, save=folder, sharded=True, **options):
        _assert_equal(result, whole, 3)
        assert result["metrics"] == pytest.approx(whole["metrics"], rel=1e-8)
    ended, saved = (torch.load(path, weights_only=True)["state_dict"] for path in (_plain(folder), plain))
    assert ended.keys() == saved.keys() and any(not torch.equal(ended[name], saved[name]) for name in saved)
    for result in _on("1x2", "sharded", str(tmp_path), 2, folder, sharded=True, **options):
        assert result["step"] == whole["step"]


def _plain(folder: str) -> str:
    consolidate(folder, f"{folder}.one")
    return f"{folder}.one"


def _refused(what: str) -> str:
    module, train, _ = build("gpt")
    options: dict[str, Any] = {"callbacks": [WeightEMA(0.5)]} if what == "average" else {}
    if what == "manual":
        module.automatic_optimization = False
    if what == "norm":
        options["sync_batchnorm"] = True
    trainer = L.Trainer(strategy=PipelineStrategy(stages=1, sync="fsdp"), devices=2, max_epochs=1, **QUIET, **options)
    return error_of(lambda: trainer.fit(module, train))


@pytest.mark.slow
def test_features_that_read_all_parameters_are_refused() -> None:
    texts = {
        "average": "WeightEMA averages all",
        "manual": "uses manual optimization",
        "norm": "sync_batchnorm=True is",
    }
    for what, text in texts.items():
        assert all(text in answer for answer in run_ranks(2, _refused, what))


@pytest.mark.slow
def test_hooks_see_all_gradients_and_accumulated_batches_count(tmp_path) -> None:
    options = {"accumulate_grad_batches": 2, "notes": Norms}
    whole = _run("1", "mean", str(tmp_path), 2, **options)
    for sync in ("sharded", "fsdp"):
        first, second = _on("1x2", sync, str(tmp_path), 2, **options)
        for result in (first, second):
            _assert_equal(result, whole)
            assert result["norms"] == pytest.approx(whole["norms"], rel=1e-8)
            assert 0.4 < result["share"] < 0.6
        assert first["share"] + second["share"] == pytest.approx(1.0)
