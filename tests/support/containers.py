"""Models whose batches come in containers of every kind, and such batches."""

from __future__ import annotations

import collections
import itertools
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["KINDS", "Reads", "TimeMajor", "WithOwnSplit", "batch_of", "content"]


@dataclass
class Derived:
    """Has fields that its constructor does not take, and an argument that is no field."""

    values: InitVar[dict[str, torch.Tensor]]
    x: torch.Tensor = field(init=False)
    y: torch.Tensor = field(init=False)
    later: torch.Tensor = field(init=False)
    name: str = "derived"

    def __post_init__(self, values: dict[str, torch.Tensor]) -> None:
        self.x, self.y = values["x"], values["y"]


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    checked: int = 3

    def __post_init__(self) -> None:
        if self.x.shape[0] != 7:
            raise ValueError("holds for the whole batch only")


@dataclass(frozen=True, slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    names: list[str]


class Named(collections.UserDict):
    """Takes more than its contents to be built, and carries more than them."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        super().__init__(data)
        self.kind = kind


class Own(dict):
    """A dict with attributes of its own."""


def batch_of(kind: str, content: dict[str, torch.Tensor]) -> Any:
    """A batch with these contents in a container of a kind."""
    if kind == "tokenizer":
        from transformers import BatchEncoding

        return BatchEncoding(dict(content))
    if kind == "output":
        from transformers.modeling_outputs import ModelOutput

        return ModelOutput(content)
    if kind == "derived":
        return Derived(content)
    if kind == "frozen":
        return Frozen(**content)
    if kind == "slots":
        return Slots(**content)
    if kind == "pair":
        return Pair(**content, names=[f"sample {i}" for i in range(len(content["x"]))])
    if kind == "named":
        return Named(content, "train")
    if kind == "own":
        own = Own(content)
        own.source = "file"  # type: ignore[attr-defined]
        return own
    if kind == "tensordict":
        from tensordict import TensorDict

        return TensorDict(content, batch_size=[len(content["x"])])
    return {"nested": [batch_of("named", content)], "names": ("a", "b")}


KINDS = ("tokenizer", "output", "derived", "frozen", "slots", "pair", "named", "own", "nested")


def content(samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 3, (samples,), generator=generator)}


class Reads(nn.Module):
    """Reads x and y of whatever its batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, batch: Any) -> Any:
        batch = batch["nested"][0] if isinstance(batch, dict) and "nested" in batch else batch
        x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)
        out = self.layers(x)
        if isinstance(batch, Named):
            assert batch.kind == "train"
            batch["x"] = out  # a step may change its container
        return Pair(F.cross_entropy(out, y), out, ["out"])


class TimeMajor(nn.Module):
    """Takes and returns (time, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(4, 6).double(), nn.GRU(6, 3).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> Any:
        hidden, last = self.second(self.first(x)[0])
        return F.cross_entropy(hidden.flatten(0, 1), y.flatten(), weights), hidden, last


class WithOwnSplit(nn.Module):
    """Its batch is one flat list of rows with the number of rows of each sample, which no dimension can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def split(self, batch: dict[str, torch.Tensor], n: int) -> list[dict[str, torch.Tensor]]:
        samples = len(batch["targets"])
        edges = [0, *batch["lengths"].cumsum(0).tolist()]
        cuts = [samples * i // min(n, samples) for i in range(min(n, samples) + 1)]
        return [
            {
                "rows": batch["rows"][edges[a] : edges[b]],
                "lengths": batch["lengths"][a:b],
                "targets": batch["targets"][a:b],
                "owner": batch["owner"][edges[a] : edges[b]] - a,
            }
            for a, b in itertools.pairwise(cuts)
        ]

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self.layers(batch["rows"])
        sums = torch.zeros(batch["lengths"].shape[0], 2, dtype=rows.dtype).index_add(0, batch["owner"], rows)
        return F.mse_loss(sums / batch["lengths"][:, None], batch["targets"])
