"""Lightning's fine-tuning callbacks compare parameters by value, which parameters of other stages do not have."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import Optimizer

from pipepart.lightning.run_patches import RunPatches

__all__ = ["connect_finetuning"]


def connect_finetuning(trainer: Trainer, patches: RunPatches) -> None:
    """Let fine-tuning callbacks ask by identity whether an optimizer has a parameter already."""
    if any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        # They call it by the name of the class.
        patches.put(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in))


def _not_in(optimizer: Optimizer, params: Any) -> list[Any]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in params if id(p) not in known]
