"""What is measured: the models of the runtime bench and the default recipe, each as a module whose forward is the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tools.bench.runtime.models import MODELS

__all__ = ["NAMES", "build"]

NAMES = (*MODELS, "recipe")


class _Recipe(nn.Module):
    """The default recipe's model with its loss: what its training step does, without the logs."""

    def __init__(self) -> None:
        super().__init__()
        from recipes.gpt import GPT

        self.model = GPT(vocabulary=256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())


def build(name: str, batch_size: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model, the same on every rank, and a batch for it."""
    torch.manual_seed(0)
    if name == "recipe":
        shape = (batch_size, 64)
        return _Recipe(), (torch.randint(0, 256, shape), torch.randint(0, 256, shape))
    kind: Any = MODELS[name]
    return kind(), kind.batch(batch_size)
