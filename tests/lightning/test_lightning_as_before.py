"""After a run, Lightning's classes and the objects of the trainer are what they were before it."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelSummary
from lightning.pytorch.plugins.precision import MixedPrecision
from support.lightning_modules import Module, loader
from support.ranks import run_ranks

from pipepart import PipelineStrategy
from pipepart.lightning.run_patches import RunPatches


class Thaw(BaseFinetuning):
    """The last layers are trained from the second epoch on."""

    def freeze_before_training(self, pl_module):
        pass

    def finetune_function(self, pl_module, epoch, optimizer):
        pass


class Looks(L.Callback):
    """What is replaced while the run lasts; raises where it is told to."""

    def __init__(self, raises: bool) -> None:
        self.raises, self.replaced = raises, []

    def on_train_batch_end(self, trainer, *args):
        self.replaced = replaced_of(trainer)
        if self.raises:
            raise KeyError("on purpose")


def classes() -> dict[tuple[type, str], Any]:
    """All attributes of all classes of Lightning."""
    found = [
        value
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "lightning"
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__.split(".")[0] == "lightning"
    ]
    return {(one, key): value for one in found for key, value in vars(one).items() if key != "__abstractmethods__"}


def replaced_of(trainer: L.Trainer) -> list[str]:
    """Functions of pipepart among the attributes of the objects that make up a trainer."""
    plugin = trainer.precision_plugin
    owners = [trainer, trainer._signal_connector, trainer.fit_loop, trainer.fit_loop.epoch_loop, plugin]
    owners += [*trainer.callbacks, getattr(plugin, "scaler", None)]
    found = []
    for owner in owners:
        for name, value in vars(owner).items() if owner is not None else ():
            function = value.func if isinstance(value, partial) else value
            if callable(function) and str(getattr(function, "__module__", "")).startswith("pipepart"):
                found.append(name)
    return sorted(found)


def fit_and_compare(stages: int, raises: bool, precision: str | None = None) -> list[str]:
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))] if precision else []
    looks = Looks(raises)
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=stages, microbatches=2, schedule="1f1b"),
        accelerator="cpu",
        devices=stages,
        max_steps=2,
        logger=False,
        plugins=plugins,
        callbacks=[Thaw(), ModelSummary(), looks],
        enable_progress_bar=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    before = classes()
    assert not replaced_of(trainer)
    if raises:
        with pytest.raises(KeyError, match="on purpose"):
            trainer.fit(Module("mlp"), loader("mlp", 32, 8))
    else:
        trainer.fit(Module("mlp"), loader("mlp", 32, 8))
    after = classes()
    changed = [f"{one.__name__}.{key}" for (one, key), value in before.items() if after.get((one, key)) is not value]
    assert not changed
    assert not replaced_of(trainer)
    return looks.replaced


@pytest.mark.parametrize("raises", [False, True], ids=["ends", "fails"])
def test_one_process(raises: bool) -> None:
    names = ["_broadcast_sigterm_tensor", "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn", "_summary"]
    assert fit_and_compare(1, raises) == [*names, "clip_grad_by_norm", "clip_grad_by_value"]


@pytest.mark.slow
def test_two_stages_with_a_scaler() -> None:
    for replaced in run_ranks(2, fit_and_compare, 2, False, "16-mixed", timeout=300):
        assert {"unscale_", "_check_inf_per_device", "_summary"} <= set(replaced)


def test_replaced_attributes_come_back() -> None:
    class Owner:
        @staticmethod
        def of_the_class() -> str:
            return "before"

    one = Owner()
    one.own = 1  # type: ignore[attr-defined]
    before, patches = vars(Owner)["of_the_class"], RunPatches()
    patches.put(Owner, "of_the_class", staticmethod(lambda: "inside"))
    patches.put(one, "of_the_class", lambda: "of the object")
    patches.put(one, "own", 2)
    patches.put(one, "own", 3)
    assert (Owner.of_the_class(), one.of_the_class(), vars(one)["own"]) == ("inside", "of the object", 3)
    for _ in range(2):
        patches.undo()
        assert vars(Owner)["of_the_class"] is before
        assert vars(one) == {"own": 1}
