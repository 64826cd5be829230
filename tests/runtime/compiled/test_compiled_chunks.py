"""Compiled chunks give the results, gradients and random draws of chunks that run as they are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipepart import Pipeline
from pipepart.runtime.compiled import NotCompiled

EAGER = {"backend": "aot_eager", "fullgraph": True}
"""Divides and runs all graphs as the compiler would, without its code, which takes long to make."""


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.norm(x).unsqueeze(1)
        q = F.scaled_dot_product_attention(q, q, q, dropout_p=self.rate if self.training else 0.0)
        return x + self.drop(self.down(F.gelu(self.up(q.squeeze(1)))))


class Net(nn.Module):
    """Has a table, attention, dropout as a layer and as a function, statistics, frozen weights and tied weights."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.table, self.mix = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block(8, rate) for rate in (0.1, 0.0, 0.0))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 11, bias=False)
        if kind == "tied":
            self.head.weight = self.table.weight
        if kind == "frozen":
            self.table.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.mix(self.table(x).transpose(1, 2)).transpose(1, 2)
        h = F.dropout(h, 0.1, self.training)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.kind == "checkpoint" and self.training else block(h)
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), ignore_index=0)


def batch(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 11, (samples, 5), generator=generator) for _ in range(2))  # type: ignore[return-value]


def trained(kind: str, compile: Any, **options: Any) -> dict[str, Any]:
    """Losses, gradients and buffers after some steps: one of another size, one of two sizes, and an evaluation."""
    model = Net(kind)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotCompiled)
        pipe = Pipeline(model, batch(8, 0), compile=compile, timeout=240.0, **options)
        losses = [float(pipe.step(*batch(size, seed))) for seed, size in enumerate((8, 8, 6, 8, 3))]
        losses.append(float(pipe.evaluate(*batch(8, 9))))
    gradients = {n: p.grad for n, p in model.named_parameters() if isinstance(p.grad, torch.Tensor)}
    buffers = {n: b.clone() for n, b in model.named_buffers() if b.device.type == "cpu"}
    return {"losses": losses, "gradients": gradients, "buffers": buffers, "plan": pipe.plan}


def both(kind: str, compile: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    expected = trained(kind, False, **options)
    return [expected, trained(kind, compile, plan=expected["plan"])]


def check(expected: dict[str, Any], found: dict[str, Any]) -> None:
    tolerances = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(found["losses"], expected["losses"], **tolerances)
    assert expected["gradients"].keys() == found["gradients"].keys() and expected["gradients"]
    for part in ("gradients", "buffers"):
        for name, value in expected[part].items():
            torch.testing.assert_close(found[part][name], value, **tolerances, msg=lambda text, n=name: f"{n}: {text}")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {"schedule": "gpipe"}),
    "tied": ("tied", {"schedule": "gpipe"}),
    "frozen": ("frozen", {"schedule": "gpipe"}),
    "recompute": ("", {"schedule": "gpipe", "recompute": True}),
    "checkpoint": ("checkpoint", {"schedule": "gpipe"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equal_to_chunks_as_they_are(name: str) -> None:
    kind, options = CASES[name]
    check(*both(kind, EAGER, {"stages": 1, "microbatches": 2, **options}))


TWO, FOUR = ["blocks.1"], ["blocks.0", "blocks.1", "blocks.2"]
"""Where two and four chunks begin: measured costs may leave a chunk without an op that is worth a compiled function."""

SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("", {"schedule": "1f1b", "split_at": TWO}),
    "interleaved": ("frozen", {"schedule": "interleaved", "chunks": 2, "split_at": FOUR}),
    "zb_h1": ("frozen", {"schedule": "zb_h1", "split_at": TWO}),
    "zb_v": ("", {"schedule": "zb_v", "split_at": FOUR}),
    "zb_h2": ("tied", {"schedule": "zb_h2", "recompute": True, "split_at": TWO}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_schedules_of_two_stages(name: str) -> None:
    kind, options = SPLIT[name]
    for expected, found in run_ranks(2, both, kind, EAGER, {"stages": 2, "microbatches": 3, **options}, timeout=900):
        check(expected, found)


def weights_are_left_for_later(compile: Any) -> list[int]:
    """The numbers of parameters that have a gradient after each `I` of a step, on this rank."""
    from pipepart.runtime import executor

    torch.set_num_threads(1)
    model = Net()
    options: dict[str, Any] = {"schedule": "zb_h1", "split_at": TWO, "compile": compile, "timeout": 240.0}
    pipe = Pipeline(model, batch(4, 0), stages=2, microbatches=2, **options)
    counts: list[int] = []
    plain = executor._StepRun._backward

    def counted(run: Any, action: Any) -> None:
        plain(run, action)
        if action.kind == "I" and not counts:
            counts.append(sum(isinstance(p.grad, torch.Tensor) for p in model.parameters()))

    executor._StepRun._backward = counted  # type: ignore[method-assign]
    try:
        pipe.step(*batch(4, 1))
    finally:
        executor._StepRun._backward = plain  # type: ignore[method-assign]
    counts.append(sum(isinstance(p.grad, torch.Tensor) for p in model.parameters()))
    return counts


@pytest.mark.slow
def test_no_gradient_of_a_weight_is_computed_with_that_of_the_input() -> None:
    for first, last in run_ranks(2, weights_are_left_for_later, EAGER, timeout=600):
        assert first == 0
        assert last > 0
