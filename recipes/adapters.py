"""LoRA adapters of peft on a model without memory: built, merged into the weights of each stage, and saved for peft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipepart.lightning import save_weights

__all__ = ["adapted", "merged", "save_adapter"]

_NAME = "default"


def adapted(model: PreTrainedModel, options: Mapping[str, Any]) -> Any:
    """The model with LoRA layers of peft. The adapters have values, since they are small; only they are trained."""
    from peft import LoraConfig, TaskType, get_peft_model

    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(**options, task_type=TaskType.CAUSAL_LM, fan_in_fan_out=transposed)
    made = get_peft_model(model, config)
    for path, layer in _layers(made).items():
        if set(layer.lora_A) != {_NAME}:
            raise ValueError(
                f"{path} ({type(layer).__name__}) is not a layer with a plain LoRA adapter: leave it out of lora_targets"
            )
        for part in (layer.lora_A[_NAME], layer.lora_B[_NAME]):
            part.to_empty(device="cpu")
        layer.reset_lora_parameters(_NAME, True)
    return made


def _layers(root: nn.Module) -> dict[str, Any]:
    """The LoRA layers by their paths."""
    from peft.tuners.lora import LoraLayer

    return {path: module for path, module in root.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def _with_values(path: str, layer: Any, adapters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the two matrices of a layer have the given values: they may be those of another stage."""
    places = [(f"{path}.lora_{letter}.{_NAME}.weight", getattr(layer, f"lora_{letter}")[_NAME]) for letter in "AB"]
    before = [module._parameters["weight"] for _, module in places]
    try:
        for name, module in places:
            module._parameters["weight"] = nn.Parameter(adapters[name], requires_grad=False)
        yield
    finally:
        for (_, module), parameter in zip(places, before):
            module._parameters["weight"] = parameter


def merged(
    root: nn.Module, part: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A part of the state dict with the adapters added to the weights of their layers."""
    found = dict(part)
    for path, layer in _layers(root).items():
        name = f"{path}.base_layer.weight"
        if name in found:
            with torch.no_grad(), _with_values(path, layer, adapters):
                found[name] = (found[name] + layer.get_delta_weight(_NAME)).to(found[name].dtype)
    return found


def save_adapter(trainer: L.Trainer, root: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Write a folder for `PeftModel.from_pretrained`. Returns all adapters on every rank; all ranks must call it."""
    strategy: Any = trainer.strategy
    adapters: dict[str, torch.Tensor] = strategy.broadcast(strategy.runtime.full_state_dict())
    state = {name.removeprefix("model."): value for name, value in adapters.items()}

    def write(part: Path) -> None:
        root.model.save_pretrained(part, state_dict=state, save_embedding_layers=False)

    save_weights(trainer, folder, lambda part: {}, extras=write)
    return adapters
