"""A small model with a head in one of many forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["CLASSES", "FORMS", "WIDTH", "Form", "Model", "batch"]

CLASSES, WIDTH = 11, 6
Form = Callable[[Any, torch.Tensor, torch.Tensor], Any]


class Model(nn.Module):
    """Hidden states, and a head in the form that is given."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.form = form
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.loss = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.form(self, torch.tanh(self.layer(self.words(x))), y)


def batch(size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    x, y = (torch.randint(0, CLASSES, (size, 5), generator=generator) for _ in range(2))
    return x, y.masked_fill(torch.arange(5)[None] >= torch.tensor([5, 2, 3, 1, 4])[:size, None], -100)


def _flat(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.head(h).flatten(0, 1), y.flatten())


def _sizes(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = m.head(h)
    b, t, c = scores.shape
    return F.cross_entropy(scores.view(b * t, c), y.view(b * t), reduction="sum") / b


def _shifted(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = m.head(h)[..., :-1, :].contiguous().to(torch.float64)
    return F.cross_entropy(scores.view(-1, scores.size(-1)).double(), y[..., 1:].contiguous().view(-1))


def _classes_second(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = m.head.bias.detach().exp()
    return F.cross_entropy(m.head(h).transpose(1, 2), y.masked_fill(y < 0, 3), weight=weight, ignore_index=3)


def _module(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return m.loss(m.head(h).permute(0, 2, 1), y.clamp(min=0))


def _tied(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, m.words.weight).reshape(-1, CLASSES), y.reshape(-1))


def _selected(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = y != -100
    return F.cross_entropy(m.head(h)[mask], y[mask])


def _last(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.head(h)[:, -1], y[:, 0])


FORMS: dict[str, Form] = {
    form.__name__[1:]: form for form in (_flat, _sizes, _shifted, _classes_second, _module, _tied, _selected, _last)
}
