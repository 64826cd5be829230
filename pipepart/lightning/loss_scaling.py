"""The loss scaler of 16-mixed precision: all ranks decide together, and the host knows the scale without asking the device.

Waits of the host for the device in one step of the optimizer:

| optimizer | where | for what |
|---|---|---|
| plain | `GradScaler.step` | whether a gradient is not finite: it is torch's own wait, and the only one |
| fused | the next `training_step` | the same number, which was copied before the optimizer began to compute |

Steps that only accumulate gradients do not wait at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipepart.devices import computes_on_host, current_stream, pinned
from pipepart.lightning.namespaces import either
from pipepart.lightning.run_patches import RunPatches
from pipepart.runtime import Groups
from pipepart.runtime.failure import guarded

__all__ = ["LossScaling", "match_device"]


def match_device(plugin: Any, device: torch.device) -> None:
    """Let mixed precision be that of the device of the run.

    Lightning makes the plugin for its own accelerators only. With an accelerator of another library, autocast would be that
    of a device which the run does not use, and the scaler would be off: the run would have full precision, or no scaling.
    """
    if not isinstance(plugin, either("MixedPrecision")) or computes_on_host(device) or plugin.device == device.type:
        return
    plugin.device, before = device.type, plugin.scaler
    if before is not None:
        plugin.scaler = torch.amp.GradScaler(device.type)
        if before.is_enabled():
            plugin.scaler.load_state_dict(before.state_dict())


class LossScaling:
    """The scaler of a precision plugin, if it has one, during a run."""

    def __init__(self, plugin: Any, groups: Groups | None, device: torch.device, patches: RunPatches) -> None:
        """Let all ranks skip a step together if a gradient is not finite on one of them.

        Gradients are checked in `unscale_`, and in `_check_inf_per_device` for fused optimizers, which unscale themselves.
        """
        scaler = plugin.scaler if isinstance(plugin, either("MixedPrecision")) else None
        self._scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self._groups, self._device = groups, device
        self._host: tuple[torch.Tensor, torch.Tensor] | None = None
        """Copies of the scale and of the growth tracker in host memory; None if they are not known."""
        self._read_at: tuple[int, int] | None = None
        """The scale of the scaler and its version to which the copies belong."""
        self._found: _Late | None = None
        """The last check of gradients."""
        self._counts = False
        """Whether the scaler was updated by this check, and the copies were not."""
        if self._scaler is not None:
            for name in ("unscale_", "_check_inf_per_device"):
                patches.put(scaler, name, self._checked_on_all_ranks(getattr(scaler, name)))
            patches.put(scaler, "update", self._followed(self._scaler.update))

    def factor(self) -> float:
        """The factor of the loss before the backward."""
        scaler = self._scaler
        if scaler is None:
            return 1.0
        if scaler._scale is None:  # made at the first use
            scaler._lazy_init_scale_growth_tracker(self._device)
        self._catch_up()
        if self._host is None or self._read_at != self._state():
            self._host = scaler._scale.cpu().clone(), scaler._growth_tracker.cpu().clone()
            self._read_at = self._state()
        return float(self._host[0])

    def _state(self) -> tuple[int, int]:
        """The scale of the scaler and how often it was written to, without reading it."""
        return id(self._scaler._scale), self._scaler._scale._version

    def _checked_on_all_ranks(self, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def check(optimizer: Any) -> Any:
            result = own(optimizer)
            found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            total = torch.zeros((), device=self._device)
            for value in found.values():
                total = torch.maximum(total, value.to(self._device, non_blocking=True))
            if self._groups is not None:
                with guarded(self._groups):
                    dist.all_reduce(total, dist.ReduceOp.MAX, group=self._groups.world)
            # One entry, also without gradients on this stage, and never above 1: fused optimizers skip a step for a sum of
            # exactly 1.
            found.clear()
            found[self._device] = total
            self._catch_up()
            self._found = _Late(total, self._device)
            return result

        return check

    def _followed(self, own: Callable[..., None]) -> Callable[..., None]:
        def update(new_scale: Any = None) -> None:
            self._catch_up()
            known = self._host is not None and self._found is not None and self._read_at == self._state()
            own(new_scale)
            self._counts = known and new_scale is None
            self._read_at = self._state() if self._counts else None
            if not self._counts:
                self._found = None

        return update

    def _catch_up(self) -> None:
        """Update the copies as the scaler has updated its own tensors, by the same op of torch."""
        if self._counts and self._found is not None and self._host is not None:
            factors = self._scaler.get_growth_factor(), self._scaler.get_backoff_factor()
            torch._amp_update_scale_(*self._host, self._found.value(), *factors, self._scaler.get_growth_interval())
            self._found = None
        self._counts = False


class _Late:
    """A number of the device that the host reads later: the copy begins at once, and only `value` waits for it."""

    def __init__(self, number: torch.Tensor, device: torch.device) -> None:
        self._event: Any = None
        if current_stream(device) is None:
            self._copy = number.detach().cpu().clone()
        else:
            self._copy = pinned(torch.zeros((), dtype=number.dtype), device)
            self._copy.copy_(number, non_blocking=True)
            self._event = torch.Event(device=device)
            self._event.record()

    def value(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy
