"""The five small models of a self-test. Each forward returns its loss; each is of a kind that pipelines get wrong."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODELS", "make_model"]

_WIDTH = 16


class Tied(nn.Module):
    """A language model whose head is its embedding: two stages hold one weight."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, _WIDTH)
        self.mixers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(depth))
        self.head = nn.Linear(_WIDTH, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        for mix, layer, norm in zip(self.mixers, self.layers, self.norms):
            h = h + mix(norm(h).transpose(1, 2)).transpose(1, 2)
            h = h + F.gelu(layer(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    def batch(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        x = torch.randint(0, 24, (size, 6))
        return x, x.roll(-1, 1)


class Skips(nn.Module):
    """Values of early layers are joined to those of late ones: tensors pass over whole stages."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * _WIDTH, _WIDTH) for _ in range(depth))
        self.out = nn.Linear(_WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], 1)))
        return F.mse_loss(self.out(x), y)

    def batch(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, _WIDTH, dtype=dtype), torch.randn(size, 1, dtype=dtype)


class BatchNorm(nn.Module):
    """Residual convolutions with batch statistics and their buffers."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(depth))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for conv, norm in zip(self.convs, self.norms):
            h = torch.relu(h + norm(conv(h)))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)

    def batch(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 3, 6, 6, dtype=dtype), torch.randint(0, 3, (size,))


class Layers(nn.Module):
    """Residual layers, in mixed precision if `mixed` names a type of devices."""

    def __init__(self, depth: int, mixed: str | None = None) -> None:
        super().__init__()
        self.mixed = mixed
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth))
        self.out = nn.Linear(_WIDTH, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.mixed, dtype=torch.bfloat16) if self.mixed else nullcontext():
            for norm, layer in zip(self.norms, self.layers):
                x = x + F.gelu(layer(norm(x)))
            scores = self.out(x)
        return F.cross_entropy(scores.to(self.out.weight.dtype), y)

    def batch(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, _WIDTH, dtype=dtype), torch.randint(0, 3, (size,))


MODELS = ("tied weights", "long skips", "BatchNorm", "mixed precision", "recompute")
"""The names of the models in the report."""


def make_model(name: str, stages: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the model of that name with the same weights in every process, with enough ops for `stages` stages."""
    torch.manual_seed(0)
    depth = max(4, stages)
    kinds = {"tied weights": Tied, "long skips": Skips, "BatchNorm": BatchNorm, "recompute": Layers}
    if name == "mixed precision":
        return Layers(2 * depth, device.type).to(device)
    return kinds[name](2 * depth if name == "recompute" else depth).to(dtype).to(device)
