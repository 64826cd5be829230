"""Small models of the kinds that bite: tied weights, skips, batch statistics. Each forward returns its loss.

They are built and fed in float64: two runs then differ by so little that tolerances do not depend on the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "MLP", "UNet", "build"]


class MLP(nn.Module):
    """A chain of layers."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(8, width)]
        for _ in range(depth):
            layers += [nn.ReLU(), nn.Linear(width, width)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x)), y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 8, dtype=torch.float64), torch.randint(0, 3, (size,))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, vocabulary: int = 32, width: int = 16, depth: int = 3, context: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        x = torch.randint(0, 32, (size, 12))
        return x, x.roll(-1, 1)


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips by concatenation, batch statistics, in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _conv(3, 6), _conv(6, 8), _conv(8, 8)
        self.up2, self.up1 = _conv(16, 6), _conv(12, 6)
        self.out = nn.Conv2d(6, 1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        u = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        u = self.up1(torch.cat([F.interpolate(u, scale_factor=2), a], 1))
        return F.binary_cross_entropy_with_logits(self.out(u), y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 3, 8, 8, dtype=torch.float64), torch.rand(size, 1, 8, 8, dtype=torch.float64).round()


MODELS: dict[str, type[nn.Module]] = {"mlp": MLP, "gpt": GPT, "unet": UNet}


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of that name in float64, with the same weights in every process."""
    torch.manual_seed(seed)
    return MODELS[name]().double()


class ResNet(nn.Module):
    """Residual blocks with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 6)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for conv, norm in zip(self.convs, self.norms):
            h = F.relu(h + norm(conv(h)))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 3, 6, 6, dtype=torch.float64), torch.randint(0, 3, (size,))


class Mixed(nn.Module):
    """Integers, booleans and plain numbers that are made early and used late: they cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.codes = nn.Linear(8, 8), nn.Embedding(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        best, positive = h.argmax(-1), h > 0
        share = float(x.shape[-1]) / 10
        for layer in self.layers:
            h = torch.tanh(layer(h))
        h = torch.where(positive, h, share * h) + self.codes(best)
        return F.cross_entropy(self.last(h), y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 8, dtype=torch.float64), torch.randint(0, 3, (size,))


class HalfFrozen(GPT):
    """The embedding and the first blocks do not learn, and the head is not tied: no gradient goes that far back."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        for part in (self.tokens, self.positions, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)


class Dropping(nn.Module):
    """Dropout between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return (x - y).pow(2).mean()

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 8, dtype=torch.float64), torch.randn(size, 8, dtype=torch.float64)


MODELS |= {"resnet": ResNet, "mixed": Mixed, "frozen": HalfFrozen, "dropping": Dropping}
