"""The optimizer and the scheduler of a configuration, in the form that Lightning expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["Make", "decayed", "optimized"]

Make = Callable[..., Any]
"""A function that makes an optimizer or a scheduler (`_partial_: true` in the configuration)."""


def optimized(parameters: Iterable[Any], optimizer: Make, scheduler: Make | None = None) -> Any:
    """The optimizer, and the scheduler, which steps after every batch."""
    made: torch.optim.Optimizer = optimizer(parameters)
    if scheduler is None:
        return made
    return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler(made), "interval": "step"}}


def decayed(module: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with weight decay for matrices, and without it for biases and norms."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
