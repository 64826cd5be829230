"""Moving average of the weights. Each stage keeps the average of its own parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipepart.errors import ConfigError
from pipepart.lightning.binding import OwnCallback
from pipepart.lightning.optimizers import gather_parts
from pipepart.lightning.pipeline_strategy import PipelineStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["WeightEMA"]


class WeightEMA(OwnCallback):
    """Keep `average = decay * average + (1 - decay) * weights` after each optimizer step, and evaluate with the average.

    Every checkpoint holds the whole average by full names, so that runs of any other shape, including one device, can
    resume it. With `swap=True` validation, test and prediction use the average; checkpoints that are written meanwhile
    hold the trained weights.
    """

    def __init__(self, decay: float = 0.999, every: int = 1, swap: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"decay must be at least 0 and below 1, got {decay!r}")
        if every < 1:
            raise ConfigError(f"every must be at least 1, got {every!r}")
        self.decay, self.every, self.swap = decay, every, swap
        self._average: dict[str, torch.Tensor] = {}
        self._trained: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] | None = None
        self._step = 0

    def _held(self, module: LightningModule) -> dict[str, torch.Tensor]:
        return {name: p for name, p in module.named_parameters() if not p.is_meta}

    def average(self, module: LightningModule) -> dict[str, torch.Tensor]:
        """The averages of the parameters on this rank, by full name."""
        return {name: value for name, value in self._average.items() if name in self._held(module)}

    # ---- following the training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        held = self._held(pl_module)
        source = self._loaded if self._loaded is not None else held
        self._average = {name: source.get(name, p).detach().clone().to(p.device) for name, p in held.items()}
        self._loaded = None
        self._step = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step or trainer.global_step % self.every:
            return
        self._step = trainer.global_step
        for name, parameter in self._held(pl_module).items():
            self._average[name].lerp_(parameter.to(self._average[name].dtype), 1.0 - self.decay)

    # ---- evaluating with the average

    @torch.no_grad()
    def _exchange(self, module: LightningModule) -> None:
        if self._trained:
            for name, parameter in self._held(module).items():
                parameter.copy_(self._trained[name])
            self._trained = {}
        elif self.swap and self._average:
            for name, parameter in self._held(module).items():
                self._trained[name] = parameter.detach().clone()
                parameter.copy_(self._average[name])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._exchange(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._trained:
            self._exchange(pl_module)

    on_test_start, on_test_end = on_validation_start, on_validation_end
    on_predict_start, on_predict_end = on_validation_start, on_validation_end

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._loaded is not None:  # no step was trained since the average was loaded
            checkpoint["pipepart_weight_ema"] = {"average": dict(self._loaded), "step": self._step}
            return
        average = {name: value.detach().cpu().clone() for name, value in self._average.items()}
        trained = {name: value.detach().cpu().clone() for name, value in self._trained.items()}
        if isinstance(trainer.strategy, PipelineStrategy):
            runtime = trainer.strategy._whole.runtime  # None: this process holds all
            if runtime is not None:
                average = gather_parts(average, runtime) or {}
                if not trainer.strategy.sharded:
                    trained = gather_parts(trained, runtime) or {}
        checkpoint["pipepart_weight_ema"] = {"average": average, "step": self._step}
        for name, value in trained.items():  # saved in the middle of an evaluation
            if name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = value

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("pipepart_weight_ema")
        self._loaded = saved["average"] if saved is not None else None
