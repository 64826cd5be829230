"""Plain models with unusual values and control: numbers, dicts, objects, masks, custom functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ["MODELS"]

VOCABULARY = 64
Example = Callable[[int], tuple[Any, ...]]
MODELS: dict[str, Callable[[], tuple[nn.Module, Example]]] = {}


def model(example: Example) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class whose forward takes the example and returns the loss."""

    def add(kind: type[nn.Module]) -> type[nn.Module]:
        MODELS[kind.__name__] = lambda: (kind(), example)
        return kind

    return add


def ids(batch: int, length: int = 12) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def vectors(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 16),)


class Layers(nn.Module):
    """A base with a few linear layers."""

    def __init__(self, count: int = 4, width: int = 16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.out = nn.Linear(width, 1)


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            return self.a(x)
        for _ in range(int(x.abs().sum().item()) % 3 + 1):
            x = self.b(x)
        return x


@model(vectors)
class DataControl(nn.Module):
    """A branch on the mean of the data, and a loop as long as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.choose = nn.Linear(16, 16), Chooser()
        self.out = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.choose(self.first(x))).pow(2).mean()


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


@model(vectors)
class CustomFunction(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Swish.apply(layer(x))
        return self.out(x).pow(2).mean()


@torch.jit.script
def scripted_gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(y)


class ScriptedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


@model(vectors)
class Scripted(Layers):
    """A scripted function and a scripted submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(ScriptedPart())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = scripted_gate(layer(x), x)
        return self.out(self.part(x)).pow(2).mean()


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, state: dict[str, Any], *, scale: float | None = None, mask: Any = None) -> dict[str, Any]:
        h = self.linear(state["h"])
        if mask is not None:
            h = h.masked_fill(~mask[..., None], 0.0)
        h = F.dropout(h, 0.1, training=self.training)
        return {"h": state["h"] + h * (scale or 1.0), "n": state["n"] + 1}


@model(lambda batch: (ids(batch),))
class Dictionaries(nn.Module):
    """Dicts with tensors and counters between modules, keyword-only arguments, a mask used by all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, 16), nn.ModuleList(KeywordBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"h": self.embed(x), "n": 0}
        for block in self.blocks:
            state = block(state, mask=x > 5)
        assert state["n"] == 4
        return state["h"].pow(2).mean()


@dataclasses.dataclass
class Hidden:
    h: torch.Tensor
    aux: torch.Tensor
    depth: int = 0


@model(vectors)
class Dataclasses(Layers):
    """A dataclass between layers, with an auxiliary loss collected on the way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = Hidden(x, x.new_zeros(()))
        for layer in self.layers:
            h = torch.tanh(layer(state.h))
            state = Hidden(h, state.aux + h.abs().mean() * 0.01, state.depth + 1)
        return self.out(state.h).pow(2).mean() + state.aux / state.depth


@model(lambda batch: (ids(batch),))
class MaskedLoss(Layers):
    """The loss is taken at positions that the data chooses: a tensor of data-dependent length."""

    def __init__(self) -> None:
        super().__init__(2)
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h).relu()
        chosen = x > 20
        return F.cross_entropy(self.head(h[chosen]), x[chosen]) + self.out(h).mean() * 0


@model(lambda batch: (ids(batch),))
class Rotary(nn.Module):
    """Rotary positions from a buffer, causal mask written in place, einsum attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, 16), nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.register_buffer("frequency", 1.0 / 100 ** (torch.arange(0, 16, 2) / 16), persistent=False)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape
        angle = torch.outer(torch.arange(length, device=x.device).float(), self.frequency)
        cos, sin = angle.cos(), angle.sin()
        mask = torch.zeros(length, length, device=x.device)
        mask[torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), 1)] = float("-inf")
        mask = mask[None].expand(batch, -1, -1).clone()
        mask[:, :, 0] = 0.0
        h = self.embed(x)
        for layer in self.qkv:
            q, k, v = layer(h).chunk(3, -1)
            q, k = (
                torch.cat([t[..., :8] * cos - t[..., 8:] * sin, t[..., 8:] * cos + t[..., :8] * sin], -1)
                for t in (q, k)
            )
            weight = (torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(16) + mask).softmax(-1)
            h = h + torch.einsum("bqk,bkd->bqd", weight, v)
        return F.cross_entropy(self.out(h)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


@model(vectors)
class PythonNumbers(Layers):
    """The batch size as a float, in divisions and roots; numpy scalars as constants."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x = layer(x) * np.float64(0.5) + np.sqrt(2.0)
            total = total + x.sum() / float(len(x)) * (1.0 / math.sqrt(x.shape[0]))
        return total.pow(2) + self.out(x).sum() / (2.0 * x.size(0))


@model(vectors)
class StraightThrough(Layers):
    """A codebook: argmin indices, detach, straight-through gradients, a commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        index = torch.cdist(x, self.codes).argmin(-1)
        code = self.codes[index]
        commit = F.mse_loss(x, code.detach()) + F.mse_loss(code, x.detach())
        z = x + (code - x).detach()
        return self.out(z).pow(2).mean() + commit


@model(vectors)
class Vmapped(Layers):
    """``torch.func.vmap`` in one submodule-free place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        pairs = torch.func.vmap(lambda row: row * row.sum())(x)
        return self.out(pairs).pow(2).mean()


@model(lambda batch: (torch.randn(batch, 32),))
class Spectrum(nn.Module):
    """Complex tensors between ops."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(17, 8)
        self.filter = nn.Parameter(torch.randn(17, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft(self.a(x)) * self.filter
        y = torch.fft.irfft(f, n=x.shape[-1])
        return self.b(f.abs()).pow(2).mean() + y.pow(2).mean()


@model(lambda batch: (ids(batch),))
class Routing(nn.Module):
    """Integers, booleans and scalars made early and used late."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tables = nn.Embedding(VOCABULARY, 16), nn.ModuleList(nn.Embedding(16, 16) for _ in range(4))
        self.gate, self.out = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        route = self.gate(h).argmax(-1)
        strong = h.norm(dim=-1) > 4
        level = h.detach().abs().mean()
        for table in self.tables:
            h = torch.where(strong[..., None], h + table(route), h) * (1 + level)
        return self.out(h).pow(2).mean()


@model(lambda batch: (torch.randn(batch, 5, 16),))
class Cells(nn.Module):
    """A Python loop over time with an ``LSTMCell``; rows from unbind and stack."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(x.shape[0], 16)
        rows = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            rows.append(h)
        return self.out(torch.stack(rows, 1)).pow(2).mean()


def draw_mask(shape: tuple[int, int], rate: float, floor: torch.Tensor | None = None) -> Any:
    """Positions to mask, drawn by numpy, as augmentations of speech do."""
    least = 0 if floor is None else int(floor.sum().item() > 0)
    return np.random.rand(*shape) < rate + 0.1 * least


@model(lambda batch: (torch.randn(batch, 5, 16),))
class NumpyMask(nn.Module):
    """In training numpy draws a mask: the function that draws it is one op, run at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.masked = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.first(x)
        if self.training:
            h[torch.tensor(draw_mask((batch, length), 0.3, floor=x), dtype=torch.bool)] = self.masked
        return self.out(self.second(h).relu()).pow(2).mean()
