"""Plain models with state: buffers, in-place changes, hooks, frozen parts, modes, parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.nn.utils import parametrizations, parametrize

from tools.bench.zoo.plain_values import Layers

__all__ = ["MODELS"]

Example = Callable[[int], tuple[Any, ...]]
MODELS: dict[str, Callable[[], tuple[nn.Module, Example]]] = {}


def model(example: Example) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class whose forward takes the example and returns the loss."""

    def add(kind: type[nn.Module]) -> type[nn.Module]:
        MODELS[kind.__name__] = lambda: (kind(), example)
        return kind

    return add


def vectors(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 16),)


@model(vectors)
class Checkpointed(Layers):
    """Activation checkpointing, both kinds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.utils.checkpoint.checkpoint(lambda h, f=layer: torch.tanh(f(h)), x, use_reentrant=bool(i % 2))
        return self.out(x).pow(2).mean()


@model(vectors)
class Normalised(nn.Module):
    """Weight norm, spectral norm (old and new), orthogonal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(16, 16))
        self.b = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.c = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.d = parametrizations.orthogonal(nn.Linear(16, 16))
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.d(self.c(self.b(self.a(x)).relu()).relu())).pow(2).mean()


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class OwnLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@model(vectors)
class Parametrized(Layers):
    """A parametrization on a module that is not of ``torch.nn``."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnLinear()
        parametrize.register_parametrization(self.own, "weight", Symmetric())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.own(layer(x)).relu()
        return self.out(x).pow(2).mean()


@model(vectors)
class ParameterLists(nn.Module):
    """Parameters in lists and dicts, used by several ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(16, 16) / 4) for _ in range(4)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(16)), "shift": nn.Parameter(torch.zeros(16))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.named["scale"] + self.named["shift"]
        return x.pow(2).mean() + 0.01 * self.weights[0].pow(2).sum()


@model(vectors)
class Teacher(Layers):
    """A moving average of the output in a buffer, a target computed without gradient, a frozen first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))
        self.drop = nn.Dropout(0.1)
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers:
            h = self.drop(layer(h).relu())
        with torch.no_grad():
            if self.training:
                self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
            target = self.layers[1](x).relu()
        return F.mse_loss(h, target) + (self.out(h).mean() - self.average.mean()).pow(2)


@model(vectors)
class Frozen(Layers):
    """All but the last layers frozen, and a detached side branch."""

    def __init__(self) -> None:
        super().__init__(6)
        for layer in self.layers[:4]:
            layer.requires_grad_(False)
        self.side = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x).pow(2).mean() + self.side(x.detach()).pow(2).mean()


@model(vectors)
class InPlace(Layers):
    """Writes through views, indices and ``out=``; reads of a value before and after it is changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x[:, 0] = 1.0
        for layer in self.layers:
            h = layer(x)
            first = h[:, :4]
            before = h.sum(1)
            first.mul_(2.0)
            h[:, 4:8] += before[:, None]
            h.clamp_(min=-3).relu_()
            x = h + F.relu(layer(h), inplace=True)
            x[:, -1].zero_()
        return self.out(x).pow(2).mean()


@model(vectors)
class SharedModules(nn.Module):
    """One block called many times; one BatchNorm in two places; one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.norm = nn.BatchNorm1d(16)
        self.alias = self.block[0]
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.block(x)
        x = self.norm(x)
        x = self.norm(self.alias(x) + x)
        return self.out(x).pow(2).mean()


class StochasticDepth(nn.Module):
    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


@model(vectors)
class Modes(Layers):
    """Dropout of every kind, stochastic depth, BatchNorm and a functional batch norm: all change in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.path, self.norm, self.alpha = StochasticDepth(0.3), nn.BatchNorm1d(16), nn.AlphaDropout(0.1)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = F.dropout(layer(x), 0.2, self.training)
            h = F.batch_norm(h, self.mean, self.var, training=self.training)
            x = x + self.path(self.norm(h))
            x = self.alpha(F.gumbel_softmax(x, tau=2.0) if self.training else x.softmax(-1)) + x
        return self.out(x).pow(2).mean()


@model(vectors)
class Autocast(Layers):
    """Regions in bfloat16, with a part inside switched back to full precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(self.layers[1](x))
            with torch.autocast("cpu", enabled=False):
                x = self.layers[2](x.float())
            y = torch.matmul(x, self.layers[3].weight)
        return self.out(y.float()).pow(2).mean()


@model(vectors)
class Hooks(Layers):
    """Forward hooks that change results, on leaves and on a module with children, and a gradient hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
        self.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        self.layers[2].register_full_backward_hook(lambda module, before, after: tuple(g * 2 for g in before))
        self.pair.register_forward_hook(lambda module, args, out: out + args[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.pair(x)
        x.register_hook(lambda grad: grad * 0.5)
        return self.out(x).pow(2).mean()


@model(vectors)
class BackwardHook(Layers):
    """A backward hook on a module that consists of several ops."""

    def __init__(self) -> None:
        super().__init__(6)
        self.pair = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.pair.register_full_backward_hook(lambda module, before, after: tuple(g * 2 for g in before))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pair(self.layers[0](x))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return self.out(x).pow(2).mean()


@model(vectors)
class Unused(Layers):
    """Layers that do not reach the loss, a result that is thrown away, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.wasted, self.scale = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wasted(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return self.out(x).pow(2).mean()


@model(vectors)
class Unregistered(Layers):
    """A frozen helper network in a plain list, so that it is not part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.helpers = [nn.Linear(16, 16).requires_grad_(False)]
        self.offset = torch.full((16,), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu() + self.offset
        return F.mse_loss(x, self.helpers[0](x)) + self.out(x).mean()


@model(vectors)
class Caching(Layers):
    """Keeps a table and the last activation as attributes; a second part reads them back."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1])
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.table[: x.shape[1]]
        self.last = x
        return self.out(self.last).pow(2).mean()


@model(vectors)
class Reassigned(Layers):
    """A buffer and a plain attribute that each call replaces by new tensors, and the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.memory = torch.zeros(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.memory
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        loss = (self.out(x) - self.mean.sum()).pow(2).mean()
        self.memory = self.memory * 0.5 + x.detach().mean(0)
        return loss
