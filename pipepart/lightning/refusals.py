"""Refusals of features that cannot work in a pipeline: by name, with an alternative, before anything is trained.

Each check reads only values that are equal in every process, so that all ranks raise the same error and none waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from pipepart.errors import ConfigError
from pipepart.lightning.as_written import AsWritten
from pipepart.lightning.averages import check_average
from pipepart.lightning.namespaces import either, of, overridden, package_of
from pipepart.lightning.precisions import check_precision
from pipepart.lightning.remote_files import check_address, is_remote

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["check_module", "check_optimizers", "check_steps", "check_trainer"]

_CALLBACKS = {
    "ModelPruning": "it replaces parameters during training, and the recorded step and its stages would be those of before. "
    "Prune before the fit (torch.nn.utils.prune)",
    "BatchSizeFinder": "it finds the batch size by running out of memory, which would end one stage and leave the messages of "
    "the others under way. The memory of a stage depends on the size of a micro-batch: use more micro-batches for a larger "
    "batch, or plan for a memory_limit (pipepart plan)",
}

_FINE_ALONE = frozenset({"BatchSizeFinder"})
"""Callbacks that are refused only if there are several processes."""


def check_trainer(trainer: Trainer) -> None:
    """Refuse features of the Trainer, for every kind of run."""
    _check_namespaces(trainer)
    alone = trainer.world_size == 1
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if alone and kind.__name__ in _FINE_ALONE:
                continue
            if kind.__name__ in _CALLBACKS and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
                raise ConfigError(
                    f"the callback {type(callback).__name__} does not work in a pipeline: {_CALLBACKS[kind.__name__]}."
                )
        check_average(callback, trainer.strategy)
        folder = getattr(callback, "dirpath", None)
        if isinstance(callback, of(trainer).ModelCheckpoint) and is_remote(folder):
            check_address(folder, trainer.world_size, f"{type(callback).__name__}.dirpath")
    check_precision(trainer.precision_plugin)


def _check_namespaces(trainer: Trainer) -> None:
    """Refuse callbacks and data modules of the other namespace, which the trainer would treat as unknown objects."""
    own = of(trainer)
    found = [(callback, "Callback") for callback in trainer.callbacks]  # type: ignore[attr-defined]
    found.append((getattr(trainer, "datamodule", None), "LightningDataModule"))
    for thing, base in found:
        package = package_of(thing)
        if package is not None and not isinstance(thing, getattr(own, base)):
            raise ConfigError(
                f"{type(thing).__name__} is a {base} of {package}, and the Trainer is that of {own.pytorch}. Their classes "
                f"are different ones: import all from the same package, {own.pytorch}."
            )


def check_module(module: LightningModule, written: AsWritten | None = None) -> None:
    """Refuse modules that cannot be trained in a pipeline, or note that their steps run as they are written."""
    name = type(module).__name__
    for path, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise ConfigError(
                f"{path} is a torch.nn.SyncBatchNorm, which communicates with all ranks, and other stages do not call it: "
                "use torch.nn.BatchNorm layers and Trainer(sync_batchnorm=True)."
            )
    if not module.automatic_optimization and any(parameter.is_meta for parameter in module.parameters()):
        raise ConfigError(
            f"{name} uses manual optimization (automatic_optimization=False) and was built on the meta device. The segments of "
            "its step are proved with values: build it with values, or use automatic optimization."
        )
    replaced = overridden("manual_backward", module, "LightningModule") or "manual_backward" in vars(module)
    if replaced and not module.automatic_optimization:
        refusal = ConfigError(
            f"{name} overrides manual_backward(). A step with manual optimization is cut at each call of that method, whose "
            "backward runs inside a schedule, so the other code would never be called: move its code to training_step."
        )
        (written or AsWritten(False)).add_or_raise(module, "training_step", refusal)
    if overridden("backward", module, "LightningModule") and not module.automatic_optimization:
        refusal = ConfigError(
            f"{name} overrides backward() and uses manual optimization (automatic_optimization=False). Each manual_backward "
            "is a segment of the step whose backward runs inside a schedule, so that method would never be called: move its "
            "code to training_step."
        )
        (written or AsWritten(False)).add_or_raise(module, "training_step", refusal)


def check_steps(module: LightningModule, steps: Sequence[str], written: AsWritten) -> None:
    """Refuse steps that read the data themselves, or note that they run as they are written."""
    for step in steps:
        own = getattr(module, step, None)
        if callable(own) and of(module).is_param_in_hook_signature(own, "dataloader_iter", explicit=True):
            refusal = ConfigError(
                f"{type(module).__name__}.{step} takes dataloader_iter. A pipeline splits batches into micro-batches itself: "
                f"use {step}(self, batch, batch_idx)."
            )
            written.add_or_raise(module, step, refusal)


def check_optimizers(optimizers: list[Any], precision: Any, automatic: bool = True) -> None:
    """Refuse optimizers that need the gradients of all stages."""
    if not automatic and isinstance(precision, either("MixedPrecision")) and precision.scaler is not None:
        raise ConfigError(
            "precision='16-mixed' scales the loss, and with manual optimization each backward and each optimizer would need a "
            "scale of its own. Use 'bf16-mixed', which needs no scaler, or '32-true'."
        )
    if automatic and len(optimizers) > 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers; automatic optimization takes one. "
            "Use parameter groups of one optimizer."
        )
    for optimizer in optimizers:
        if type(optimizer).__name__ == "SparseAdam":
            raise ConfigError(
                "SparseAdam needs sparse gradients, which stages do not exchange: use sparse=False and Adam."
            )
        scaled = isinstance(precision, either("MixedPrecision")) and precision.scaler is not None
        if scaled and "grad_scaler" in inspect.signature(optimizer.step).parameters:
            raise ConfigError(
                f"{type(optimizer).__name__}.step takes grad_scaler: it decides by the gradients of its own stage whether "
                "a step is skipped, and stages would differ. Use an optimizer that reads `found_inf` (as those of torch.optim "
                "with fused=True do), or precision='bf16-mixed', which needs no scaler."
            )
