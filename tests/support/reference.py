"""One plain process: what every pipeline must be equal to."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["assert_close", "reference_step"]


def reference_step(model: nn.Module, batch: tuple[torch.Tensor, ...], sizes: list[int]) -> torch.Tensor:
    """Loss and gradients of a batch in plain PyTorch, with the same micro-batches weighted by their sizes."""
    total = sum(sizes)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for part in zip(*(tensor.split(sizes) for tensor in batch)):
        loss = model(*part)
        weight = len(part[0]) / total
        (loss * weight).backward()
        loss_sum = loss_sum + loss.detach() * weight
    return loss_sum


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, relative: float = 1e-9) -> None:
    """Equal up to the rounding of float64: relative to the largest entry, since entries near 0 are sums that cancel."""
    scale = expected.abs().max().item() or 1.0
    error = (got - expected).abs().max().item()
    assert error <= relative * scale, f"{name}: largest difference {error:.3g} at scale {scale:.3g}"
