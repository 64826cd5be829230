"""16-bit floats with a loss scaler: one decision over all stages, or their weights would part ways."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import Optimizer

from pipepart.errors import ConfigError
from pipepart.lightning.run_patches import RunPatches
from pipepart.runtime import Groups
from pipepart.runtime.failure import guarded

__all__ = ["check_scaled_optimizers", "connect_scaler", "loss_scale_of"]


def loss_scale_of(plugin: Any, device: torch.device) -> float:
    """By how much the loss is scaled before the backward."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is None or not scaler.is_enabled():
        return 1.0
    if scaler._scale is None:  # made at the first use
        scaler._lazy_init_scale_growth_tracker(device)
    return float(scaler.get_scale())


def connect_scaler(plugin: Any, groups: Groups | None, device: torch.device, patches: RunPatches) -> None:
    """A gradient that is not finite on one stage counts on all: they skip the step together.

    Gradients are looked at in `unscale_`, and, for fused optimizers, which unscale them themselves, in
    `_check_inf_per_device`.
    """
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is None or groups is None:
        return
    for name in ("unscale_", "_check_inf_per_device"):
        patches.put(scaler, name, _together(getattr(scaler, name), scaler, groups, device))


def check_scaled_optimizers(plugin: Any, optimizers: Sequence[Optimizer]) -> None:
    """An optimizer that asks the scaler itself would decide for its own stage alone."""
    if not isinstance(plugin, MixedPrecision) or plugin.scaler is None:
        return
    for optimizer in optimizers:
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            raise ConfigError(
                f"{type(optimizer).__name__}.step takes grad_scaler: it decides by the gradients of its own stage whether "
                "a step is skipped, and stages would part. Use an optimizer that reads `found_inf` (as those of torch.optim "
                "with fused=True do), or precision='bf16-mixed', which needs no scaler."
            )


def _together(own: Callable[[Any], Any], scaler: Any, groups: Groups, device: torch.device) -> Callable[[Any], Any]:
    """The check of one stage as a check of all."""

    def check(optimizer: Any) -> Any:
        result = own(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        total = torch.zeros((), device=device)
        for value in found.values():
            total += value.to(device)
        with guarded(groups):
            dist.all_reduce(total)
        for key in found:
            found[key].copy_(total)
        if not found:  # no parameter of this stage has a gradient
            found[device] = total
        return result

    return check
