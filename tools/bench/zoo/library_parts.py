"""What models of libraries are put together with: a loss around any model, examples, objects by their full names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ["Built", "Example", "Squares", "Tokens", "elsewhere", "floats", "ids", "language", "net", "of"]

Example = Callable[[int], tuple[Any, ...]]
Built = tuple[nn.Module, Example]


class Squares(nn.Module):
    """Any model with the mean of the squares of what it returns."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        super().__init__()
        self.model, self.fixed = model, fixed

    def forward(self, *args: Any) -> torch.Tensor:
        return _squares(self.model(*args, **self.fixed))


def _squares(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out.pow(2).mean() if out.is_floating_point() else out.new_zeros(())
    if hasattr(out, "to_tuple"):
        out = out.to_tuple()
    items = list(out.values()) if isinstance(out, dict) else list(out)
    parts = [
        _squares(item)
        for item in items
        if isinstance(item, (torch.Tensor, list, tuple, dict)) or hasattr(item, "to_tuple")
    ]
    return sum(parts[1:], parts[0])


class Tokens(nn.Module):
    """A language model with its cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(ids)
        out = out[0] if isinstance(out, tuple) else out
        return F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def of(path: str, *args: Any, **kwargs: Any) -> Any:
    """An object of a library by its full name, called."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def floats(*shapes: tuple[int, ...]) -> Example:
    return lambda n: tuple(torch.randn(n, *shape) for shape in shapes)


def ids(length: int = 16, vocabulary: int = 64) -> Example:
    return lambda n: (torch.randint(0, vocabulary, (n, length)),)


def net(path: str, *shapes: tuple[int, ...], call: dict[str, Any] | None = None, **options: Any) -> Callable[[], Built]:
    """A model that takes floats of these shapes (without the samples)."""
    return lambda: (Squares(of(path, **options), **(call or {})), floats(*shapes))


def language(make: Callable[[], nn.Module], length: int = 16) -> Callable[[], Built]:
    return lambda: (Tokens(make()), ids(length))


def elsewhere(family: str, name: str) -> Callable[[], Built]:
    """A model of another family of the zoo."""
    return lambda: importlib.import_module(f"tools.bench.zoo.{family}").ARCHITECTURES[name]()
