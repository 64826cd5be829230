"""Lightning's model summary of a module of which this rank holds a part: its forward is run on shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary

from pipepart.lightning.announce import tell
from pipepart.lightning.run_patches import RunPatches
from pipepart.recording.model_state.state import stand_ins

__all__ = ["connect_summary"]


def connect_summary(trainer: Trainer, patches: RunPatches) -> None:
    """Let the summaries of a trainer find sizes by ``example_input_array`` without any values."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            patches.put(callback, "_summary", partial(_summary, callback._summary))


def _summary(original: Callable[..., Any], trainer: Trainer, pl_module: LightningModule) -> Any:
    if pl_module.example_input_array is None:
        return original(trainer, pl_module)
    try:
        with stand_ins(pl_module) as mode, mode:
            return original(trainer, pl_module)
    except Exception as error:  # without values, some forwards cannot be run
        if trainer.is_global_zero:
            reason = (str(error).strip().splitlines() or [""])[0][:160]
            tell(
                "pipepart: the model summary shows no sizes: no rank holds the whole model, and on shapes alone the forward "
                f"fails with {type(error).__name__}: {reason}"
            )
        example = pl_module.example_input_array
        pl_module.example_input_array = None
        try:
            return original(trainer, pl_module)
        finally:
            pl_module.example_input_array = example
