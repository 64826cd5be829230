"""Batches that a training step skips: it returns None, and the batch has no gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipepart.errors import ConfigError
from pipepart.lightning.namespaces import of
from pipepart.lightning.run_patches import RunPatches
from pipepart.runtime import Mesh

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["allow_skipped_batches", "check_skipped_batch"]


def allow_skipped_batches(trainer: Trainer, mesh: Mesh, patches: RunPatches) -> None:
    """Let the stages of one replica skip a batch together. Lightning refuses it in any run of several processes."""
    if mesh.stages == 1 or mesh.replicas > 1:
        return
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    calls: Any = of(trainer).module("pytorch.trainer.call")

    def training_step(kwargs: Mapping[str, Any]) -> Any:
        output = calls._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        return loop.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)

    patches.put(loop, "_training_step", training_step)


def check_skipped_batch(name: str, mesh: Mesh) -> None:
    """Refuse a skipped batch in a run with replicas: `name` is the class of the module."""
    if mesh.replicas > 1:
        raise ConfigError(
            f"{name}.training_step returned None to skip a batch, and there are {mesh.replicas} replicas: the others would "
            "wait for its gradients. Leave such batches out of the data, multiply the loss by 0, or use one replica."
        )
