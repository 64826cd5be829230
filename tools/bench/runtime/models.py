"""Models to measure on: stages that sleep (nothing but the schedule and the runtime counts), a GPT, a ResNet, a U-Net."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODELS", "Chain", "SleepLayer", "Sleepy", "slept"]


def _rest(until: float) -> None:
    """Sleep, but be there in time: sleepers wake up late by a tenth of a millisecond and more."""
    time.sleep(max(0.0, until - time.perf_counter() - 0.0001))
    while time.perf_counter() < until:
        pass


_slept = [0.0]


def slept() -> float:
    """The seconds that forwards of sleeping layers have taken in this process."""
    return _slept[0]


class _Sleep(torch.autograd.Function):
    """A scaled copy that takes as long as it was told, its own arithmetic included."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, seconds: float) -> torch.Tensor:
        began = time.perf_counter()
        ctx.save_for_backward(x, scale)
        ctx.seconds = seconds
        y = x * scale
        _rest(began + seconds)
        _slept[0] += time.perf_counter() - began
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        until = time.perf_counter() + 2 * ctx.seconds
        x, scale = ctx.saved_tensors
        to_x, to_scale = gradient * scale, (gradient * x).sum(0)
        _rest(until)
        return to_x, to_scale, None


class SleepLayer(nn.Module):
    """Takes 10 ms forward and 20 ms backward without using a core."""

    def __init__(self, seconds: float, width: int = 256) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.scale, self.seconds)


class Sleepy(nn.Module):
    """A chain of sleeping layers whose forward returns a loss."""

    def __init__(self, layers: int, seconds: float = 0.010) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(SleepLayer(seconds) for _ in range(layers)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 256), torch.randn(size, 256)


class _Block(nn.Module):
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
    """Blocks between an embedding and a head that is worth two blocks: the even split is a bad one."""

    def __init__(
        self, vocabulary: int = 4096, width: int = 192, depth: int = 6, context: int = 64, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def parts(self) -> list[nn.Module]:
        return [_Embed(self.tokens, self.positions), *self.blocks, nn.Sequential(self.norm, self.head)]

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.loss(self.head(self.norm(self.blocks(h))), y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 4096, (size, 64))
        return x, x.roll(-1, 1)


class _Embed(nn.Module):
    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(nn.Conv2d(3, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU())
        shapes = [(w, w, 1), (w, w, 1), (w, 2 * w, 2), (2 * w, 2 * w, 1), (2 * w, 4 * w, 2), (4 * w, 4 * w, 1)]
        self.blocks = nn.Sequential(*(_Residual(*shape) for shape in shapes))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10))

    def parts(self) -> list[nn.Module]:
        return [self.stem, *self.blocks, self.head]

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.blocks(self.stem(x))), y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))


class TiedGPT(GPT):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__(tied=True)


class _Down(nn.Module):
    """Takes (..., h), gives (..., skip, smaller h)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1))

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        skip = F.relu(self.conv(values[-1]))
        return (*values[:-1], skip, F.max_pool2d(skip, 2))


class _Up(nn.Module):
    """Takes (..., skip, h), gives (..., larger h)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1))

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *rest, skip, h = values
        h = torch.cat([skip, F.interpolate(h, scale_factor=2.0)], dim=1)
        return (*rest, F.relu(self.conv(h)))


class UNet(nn.Module):
    """Skips from each level on the way down to the same level on the way up."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        w = width
        self.down = nn.ModuleList([_Down(3, w), _Down(w, 2 * w), _Down(2 * w, 4 * w)])
        self.middle = nn.Sequential(nn.Conv2d(4 * w, 4 * w, 3, 1, 1), nn.ReLU())
        self.up = nn.ModuleList([_Up(8 * w, 2 * w), _Up(4 * w, w), _Up(2 * w, w)])
        self.head = nn.Conv2d(w, 4, 1)

    def parts(self) -> list[nn.Module]:
        """For a runtime that knows neighbours only: what is skipped over must be carried along by hand."""
        return [*self.down, _OnLast(self.middle), *self.up, self.head]

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values: tuple[torch.Tensor, ...] = (x,)
        for down in self.down:
            values = down(*values)
        values = (*values[:-1], self.middle(values[-1]))
        for up in self.up:
            values = up(*values)
        return self.loss(self.head(values[-1]), y)

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 3, 32, 32), torch.randint(0, 4, (size, 32, 32))


class _OnLast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*values[:-1], self.inner(values[-1]))


class Chain(nn.Module):
    """Parts one after the other; tuples are passed on as several arguments."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: torch.Tensor) -> Any:
        for value in values:
            if value.requires_grad:  # upstream hangs over the gradient of a part of a cat, which is not contiguous
                value.register_hook(lambda gradient: gradient.contiguous())
        for part in self.parts:
            found = part(*values)
            values = found if isinstance(found, tuple) else (found,)
        values = tuple(value.contiguous() for value in values)  # upstream can send nothing else
        return values if len(values) > 1 else values[0]


MODELS: dict[str, Any] = {"gpt": GPT, "unet": UNet, "resnet": ResNet, "tied gpt": TiedGPT}
