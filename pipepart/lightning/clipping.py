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


def connect_clipping(plugin: Any, runtime: Callable[[], StageRuntime | None], patches: RunPatches) -> None:
    """Let a precision plugin of Lightning clip by the norm of all stages, and by value where a stage has no gradients.

    Without a `runtime` there are no stages, and the plugin clips by itself.
    """
    patches.put(plugin, "clip_grad_by_norm", partial(_by_norm, plugin, plugin.clip_grad_by_norm, runtime))
    patches.put(plugin, "clip_grad_by_value", partial(_by_value, plugin))


def _by_norm(
    plugin: Any,
    alone: Callable[..., None],
    runtime: Callable[[], StageRuntime | None],
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    stage = runtime()
    if stage is None:
        alone(optimizer, clip_val)
        return
    with aside():
        stage.clip_grad_norm(list(plugin.main_params(optimizer)), clip_val)


def _by_value(plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    own = [parameter for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
    if own:  # torch fails without any
        torch.nn.utils.clip_grad_value_(own, clip_value=clip_val)
