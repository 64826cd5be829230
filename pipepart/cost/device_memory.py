"""The memory of an accelerator: the bytes that a stage may plan with, whether the whole model fits, and parts of it there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipepart.devices import computes_on_host, memory_of
from pipepart.recording.model_state.state import stays_on_host

__all__ = ["Room", "lent", "lent_tensor", "reserve_of", "room_of", "stays_on_host", "whole_fits"]

_RESERVE = 0.1
"""The part of a device that no plan uses: buffers of communicators (tens of megabytes for each pair of ranks), workspaces
of libraries, and gaps between blocks of the allocator."""
_MOST_RESERVE = 6_000_000_000
"""Bytes of the reserve at most: communicators and workspaces do not grow with the device."""
_FOR_ACTIVATIONS = 0.25
"""The part of the room that is kept for activations when the whole model is measured on one device."""


@dataclass(frozen=True)
class Room:
    """The bytes of a device that this process may use."""

    total: int
    others: int
    """Used by other processes and by the runtime of the device."""
    reserve: int

    @property
    def bytes(self) -> int:
        return max(1, self.total - self.others - self.reserve)

    def __str__(self) -> str:
        return (
            f"device of {self.total / 1e9:.3g} GB, less {self.others / 1e9:.3g} GB in use and {self.reserve / 1e9:.3g} GB "
            "in reserve"
        )


def reserve_of(total: int) -> int:
    """Return the bytes of a device of this size that no plan uses."""
    return int(min(_RESERVE * total, _MOST_RESERVE))


def room_of(device: torch.device) -> Room | None:
    """Return the room on an accelerator; None for the CPU, and where torch cannot tell.

    Memory that the allocator of this process holds counts as free: the model may be there already, and will be divided.
    """
    found = memory_of(device)
    if found is None:
        return None
    own = 0
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        own = int(torch.get_device_module(device).memory_reserved(device))
    return Room(found.total, max(0, found.total - found.free - own), reserve_of(found.total))


def whole_fits(root: nn.Module, device: torch.device) -> bool:
    """Return whether all parameters with their gradients, all buffers and some activations fit on the device.

    On the CPU the answer is yes: the model is there already.
    """
    room = None if computes_on_host(device) else room_of(device)
    if room is None:
        return True
    needed = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in root.parameters())
    needed += sum(buffer.numel() * buffer.element_size() for buffer in root.buffers())
    return needed <= (1 - _FOR_ACTIVATIONS) * room.bytes


@contextmanager
def lent(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Give modules copies of their parameters and buffers on a device; at the end they have their own again."""
    own: list[tuple[nn.Module, str, torch.Tensor]] = []
    try:
        for module in {id(part): part for given in modules for part in given.modules()}.values():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and tensor.device != device:
                    own.append((module, name, tensor))
                    setattr(module, name, lent_tensor(tensor, device))
        yield
    finally:
        for module, name, tensor in own:
            setattr(module, name, tensor)


def lent_tensor(value: Any, device: torch.device) -> Any:
    """Return a copy of a parameter or buffer on a device; other values stay as they are."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    copy = value.detach().to(device)
    return nn.Parameter(copy, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else copy
