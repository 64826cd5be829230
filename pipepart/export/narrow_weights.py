"""Weights in 8 or 4 bits: whole numbers with a scale, from which the module computes its weights when it is called."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["BITS", "LEAST", "Codes", "can_be_narrow", "narrowed", "with_narrow_weights"]

BITS = {"int8": 8, "int4": 4}
LEAST = 256
"""Elements of the smallest weight that is narrowed: smaller ones cost more in accuracy than they save."""
_GROUP = 32
"""Weights of a row that have one scale in 4 bits."""


@dataclass(frozen=True)
class Codes:
    """A weight as whole numbers: `codes * scale` is the weight.

    8 bits: one scale for each index of the first dimension. 4 bits: two numbers in a byte, and one scale for 32 neighbours of a
    row; the last ones of a row may be fill.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    shape: tuple[int, ...]
    bits: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def weight(self) -> torch.Tensor:
        return _Widened(self.shape, self.bits)(self.codes, self.scale)


def narrowed(weight: torch.Tensor, bits: int) -> Codes:
    """Round a weight to the nearest multiple of its scales."""
    shape, rows = tuple(weight.shape), weight.detach().reshape(len(weight), -1)
    if bits == 8:
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 127
        return Codes((rows / scale).round().clamp(-127, 127).to(torch.int8), scale, shape, bits)
    fill = -rows.shape[1] % _GROUP
    groups = nn.functional.pad(rows, (0, fill)).reshape(len(rows), -1, _GROUP)
    scale = groups.abs().amax(dim=2, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 7
    numbers = ((groups / scale).round().clamp(-7, 7) + 8).to(torch.uint8)
    return Codes(numbers[..., ::2] | (numbers[..., 1::2] << 4), scale, shape, bits)


class _Widened(nn.Module):
    """The weight from its codes and scales; as a parametrization of a module, at every call of it."""

    def __init__(self, shape: tuple[int, ...], bits: int) -> None:
        super().__init__()
        self.shape, self.bits = shape, bits

    def forward(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return (codes.to(scale.dtype) * scale).reshape(self.shape)
        numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(scale.dtype) - 8
        rows = (numbers * scale).reshape(self.shape[0], -1)
        return rows[:, : torch.Size(self.shape[1:]).numel()].reshape(self.shape)

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = narrowed(weight, self.bits)
        return found.codes, found.scale


def can_be_narrow(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and weight.ndim >= 2 and weight.numel() >= LEAST


def _places(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The weights that can be narrow. Recurrent modules of torch keep a second list of theirs, so they stay as they are."""
    for module in root.modules():
        if not isinstance(module, nn.RNNBase):
            for name, weight in list(module._parameters.items()):
                if weight is not None and can_be_narrow(weight):
                    yield module, name, weight


def with_narrow_weights(root: nn.Module, bits: int) -> nn.Module:
    """A copy of a module that holds its large weights in so many bits. Tied weights stay tied."""
    copy = deepcopy(root).requires_grad_(False)
    made: dict[int, Any] = {}
    keep = []  # an id is unique as long as its object lives
    for module, name, weight in list(_places(copy)):
        parametrize.register_parametrization(module, name, _Widened(tuple(weight.shape), bits), unsafe=True)
        own: Any = module.parametrizations[name]  # type: ignore[index]
        first = made.setdefault(id(weight), own)
        keep.append(weight)
        own.original0, own.original1 = first.original0, first.original1
    return copy
