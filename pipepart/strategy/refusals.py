"""What cannot work in a pipeline is refused by name, with what to do instead, before anything is trained."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden

from pipepart.errors import ConfigError

__all__ = ["check_module", "check_optimizers"]


def check_module(module: LightningModule, trainer: Trainer) -> None:
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigError(
            f"{name} uses manual optimization (automatic_optimization=False). A pipeline runs forward and backward of all "
            "micro-batches itself, so it needs automatic optimization: return the loss from training_step."
        )
    if is_overridden("backward", module, LightningModule):
        raise ConfigError(
            f"{name} overrides backward(). The backward of a pipeline runs inside its schedule, so that method would never be "
            "called: put what it does into training_step (scaling the loss) or on_after_backward (changing gradients)."
        )
    plugin: Any = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise ConfigError("precision='16-mixed' needs a loss scaler over all stages, which is not there yet: use 'bf16-mixed'.")


def check_optimizers(optimizers: list[Any]) -> None:
    if len(optimizers) > 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers; automatic optimization takes one. "
            "Use parameter groups of one optimizer."
        )
    for optimizer in optimizers:
        if type(optimizer).__name__ == "LBFGS":
            raise ConfigError("LBFGS works on all parameters as one vector, and a stage has only its own: use another optimizer.")
