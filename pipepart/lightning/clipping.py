"""Clipping of gradients where each rank holds some of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from pipepart.lightning.hook_calls import aside
from pipepart.lightning.run_patches import RunPatches
from pipepart.runtime import StageRuntime

__all__ = ["connect_clipping"]


def connect_clipping(plugin: Any, runtime: Callable[[], StageRuntime], patches: RunPatches) -> None:
    """Let a precision plugin of Lightning clip by the norm of all stages, and by value where a stage has no gradients."""
    patches.put(plugin, "clip_grad_by_norm", partial(_by_norm, plugin, runtime))
    patches.put(plugin, "clip_grad_by_value", partial(_by_value, plugin))


def _by_norm(plugin: Any, runtime: Callable[[], StageRuntime], optimizer: Optimizer, clip_val: float) -> None:
    with aside():
        runtime().clip_grad_norm(list(plugin.main_params(optimizer)), clip_val)


def _by_value(plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    own = [parameter for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
    if own:  # torch fails without any
        torch.nn.utils.clip_grad_value_(own, clip_value=clip_val)
