"""16-bit floats with a loss scaler: one decision over all stages, or their weights would part ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision

from pipepart.runtime import Groups
from pipepart.runtime.failure import guarded

__all__ = ["connect_scaler", "loss_scale_of"]


def loss_scale_of(plugin: Any, device: torch.device) -> float:
    """By how much the loss is scaled before the backward."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is None or not scaler.is_enabled():
        return 1.0
    if scaler._scale is None:  # made at the first use
        scaler._lazy_init_scale_growth_tracker(device)
    return float(scaler.get_scale())


def connect_scaler(plugin: Any, groups: Groups | None, device: torch.device) -> None:
    """After unscaling, a gradient that is not finite on one stage counts on all: they skip the step together."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is None or groups is None or hasattr(scaler, "_pipepart"):
        return
    own = scaler.unscale_

    def unscale(optimizer: Any) -> None:
        own(optimizer)
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

    scaler.unscale_, scaler._pipepart = unscale, True  # type: ignore[method-assign, attr-defined]
