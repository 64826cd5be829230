"""Fits of a Trainer on the stand-in device: equal to a plain loop in one process, in every precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from support.lightning_modules import Module, loader
from support.models import build
from support.ranks import run_standin
from support.reference import assert_close

QUIET: dict[str, Any] = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "standin",
}  # fmt: skip
STEPS = 4


def _trainer(stages: int, replicas: int = 1, **options: Any) -> L.Trainer:
    from support.standin.lightning_device import register_accelerator

    from pipepart import PipelineStrategy

    register_accelerator()
    own = {name: options.pop(name) for name in ("schedule", "recompute") if name in options}
    strategy = PipelineStrategy(stages=stages, replicas=replicas, microbatches=2, timeout=60, **own)
    given = {"max_steps": STEPS, "enable_checkpointing": False, "use_distributed_sampler": False, **QUIET, **options}
    return L.Trainer(strategy=strategy, devices=stages * replicas, **given)


def _plain(name: str, steps: int, clip: float | None = None) -> dict[str, torch.Tensor]:
    """The weights after a plain loop on the CPU in float64."""
    module = Module(name)
    (optimizer,), (scheduler,) = _optimizers(module)
    for number, (x, y) in enumerate(loader(name, 8 * STEPS, 8)):
        if number == steps:
            break
        optimizer.zero_grad()
        module.model(x, y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return module.state_dict()


def _optimizers(module: Module) -> tuple[list[Any], list[Any]]:
    made = module.configure_optimizers()
    return [made["optimizer"]], [made["lr_scheduler"]["scheduler"]]


def _fit(name: str, stages: int, options: dict[str, Any]) -> list[str]:
    from support import standin

    module = Module(name)
    trainer = _trainer(stages, **options)
    counted: list[int] = []

    class Counting(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            standin.reset_host_waits()

        def on_before_zero_grad(self, *args: Any) -> None:
            counted.append(len(standin.host_waits()))

    trainer.callbacks.append(Counting())
    data = loader(name, 8 * STEPS, 8)
    trainer.fit(module, data, loader(name, 8, 8, seed=9))
    expected = _plain(name, STEPS, options.get("gradient_clip_val"))
    for key, value in module.state_dict().items():
        assert value.device.type == "cpu", key  # as Lightning leaves it after a run
        assert_close(key, value, expected[key])
    assert torch.isfinite(trainer.callback_metrics["val_loss"])
    assert not standin.races()
    assert max(counted[1:3]) <= 1, counted  # the first step makes metrics and states, the last one is traced
    return [str(count) for count in counted]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [
        ("gpt", 2, {"precision": "64-true"}),
        ("gpt", 2, {"gradient_clip_val": 0.05, "schedule": "zb_h1"}),
        ("gpt", 3, {"schedule": "interleaved", "recompute": True}),
    ],
)
def test_a_fit_is_equal_to_a_plain_loop(name: str, stages: int, options: dict[str, Any]) -> None:
    run_standin(_fit, name, stages, options, ranks=stages)


class Single(Module):
    """In float32, with an optimizer that is fused or not."""

    def __init__(self, fused: bool) -> None:
        super().__init__("gpt")
        self.float()
        self.fused = fused

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, fused=self.fused)


def _plugin(precision: str) -> MixedPrecision:
    # Lightning makes this plugin for its own accelerators; its scaler overflows in the first steps of this model.
    scaler = torch.amp.GradScaler("standin", init_scale=2.0**40, growth_interval=2) if precision == "16-mixed" else None
    return MixedPrecision(precision, "standin", scaler)


def _mixed(precision: str, fused: bool, clip: float | None, replicas: int) -> tuple[dict[str, torch.Tensor], float]:
    module, plugin = Single(fused), _plugin(precision)
    trainer = _trainer(2, replicas, plugins=[plugin], gradient_clip_val=clip, max_steps=12)
    trainer.fit(module, loader("gpt", 96, 8))
    scale = plugin.scaler.get_scale() if plugin.scaler is not None else 1.0
    return {key: value.clone() for key, value in module.state_dict().items()}, scale


def _mixed_reference(precision: str, fused: bool, clip: float | None) -> tuple[dict[str, torch.Tensor], float]:
    """The same in one process on one device of the stand-in, with the same micro-batches, by the way of torch."""
    device = torch.device("standin", 0)
    module, plugin = Single(fused).to(device), _plugin(precision)
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    scaler = plugin.scaler or torch.amp.GradScaler("standin", enabled=False)
    optimizer = module.configure_optimizers()
    for batch in loader("gpt", 96, 8):
        optimizer.zero_grad()
        for half in range(2):
            x, y = (part[half * 4 : half * 4 + 4].to(device) for part in batch)
            with torch.autocast("standin", dtype=dtype):
                loss = module.model(x, y) / 2
            scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return {key: value.cpu() for key, value in module.state_dict().items()}, scaler.get_scale()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "fused", "clip", "replicas"),
    [
        ("bf16-mixed", False, None, 1),
        ("16-mixed", False, None, 1),
        ("16-mixed", False, 0.1, 1),
        ("16-mixed", True, None, 1),
        ("16-mixed", True, None, 2),
    ],
)
def test_mixed_precision(precision: str, fused: bool, clip: float | None, replicas: int) -> None:
    """All ranks skip the same steps: those in which the gradient of any stage overflows."""
    answers = run_standin(_mixed, precision, fused, clip, replicas, ranks=2 * replicas)
    ((expected, scale),) = run_standin(_mixed_reference, precision, fused, clip)
    for state, own_scale in answers:
        assert own_scale == scale
        for key, value in expected.items():
            assert_close(key, state[key].double(), value.double(), relative=0.05)
    assert precision == "bf16-mixed" or scale < 2.0**40


class Built(Module):
    """Built on the meta device: no rank ever holds the whole model."""

    def __init__(self) -> None:
        super().__init__("gpt")
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = build("gpt")


def _checkpointed(stages: int, resume: str | None, steps: int, folder: str, meta: bool) -> dict[str, torch.Tensor]:
    """Train from a checkpoint up to `steps`, save, and return the saved weights."""
    module = Built() if meta else Module("gpt", seed=3)
    saving = ModelCheckpoint(folder, filename=f"{stages}-{{step}}", every_n_train_steps=steps)
    trainer = _trainer(stages, max_steps=steps, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, loader("gpt", 16, 8), ckpt_path=resume)  # a checkpoint is at the end of an epoch
    saved = torch.load(f"{folder}/{stages}-step={steps}.ckpt", weights_only=True)
    leaves = [value for state in saved["optimizer_states"][0]["state"].values() for value in state.values()]
    assert all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor))
    return saved["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("meta", [False, True], ids=["plain", "meta-built"])
def test_a_checkpoint_resumes_at_another_shape(tmp_path: Path, meta: bool) -> None:
    run_standin(_checkpointed, 2, None, 2, str(tmp_path), False, ranks=2)
    resumed = run_standin(_checkpointed, 3, str(tmp_path / "2-step=2.ckpt"), 4, str(tmp_path), meta, ranks=3)[0]
    module = Module("gpt", seed=3)
    (optimizer,), (scheduler,) = _optimizers(module)
    for x, y in [*loader("gpt", 16, 8)] * 2:
        optimizer.zero_grad()
        module.model(x, y).backward()
        optimizer.step()
        scheduler.step()
    for key, value in module.state_dict().items():
        assert_close(key, resumed[key], value)
