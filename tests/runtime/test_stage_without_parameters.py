"""A stage without parameters: a loop that is the same on every rank trains as one process does."""

from __future__ import annotations

from typing import Any

import torch
from support.ranks import run_ranks
from torch import nn

from pipepart import Pipeline


class Small(nn.Module):
    """All of its parameters are in one layer, so one of two stages has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        for _ in range(4):
            hidden = torch.tanh(hidden) * 1.5
        return hidden.pow(2).mean()


def _batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 6).double() for _ in range(3)]


def _train(optimizer: str) -> dict[str, Any]:
    batches = _batches()
    pipe = Pipeline(Small(), (batches[0],), stages=2, microbatches=2)
    stepped: Any = getattr(torch.optim, optimizer)(pipe.parameters(), lr=0.1)
    norms = []
    for x in batches:
        pipe.step(x)
        norms.append(float(pipe.clip_grad_norm_(0.05)))
        stepped.step()
        stepped.zero_grad()
    count = sum(p.numel() for p in pipe.parameters())
    return {
        "state": pipe.state_dict(),
        "own": [key for key, _ in pipe.named_parameters()],
        "count": count,
        "norms": norms,
    }


def test_a_stage_without_parameters_trains() -> None:
    for name in ("SGD", "AdamW"):
        model = Small()
        stepped: Any = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        norms = []
        for x in _batches():
            model(x).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            stepped.step()
            stepped.zero_grad()
        first, second = run_ranks(2, _train, name, timeout=300)
        assert sorted(len(answer["own"]) for answer in (first, second)) == [0, 2]
        assert sorted(answer["count"] for answer in (first, second)) == [0, 28]
        torch.testing.assert_close(first["state"], dict(model.state_dict()), rtol=1e-9, atol=1e-12)
        for answer in (first, second):
            torch.testing.assert_close(answer["norms"], norms, rtol=1e-12, atol=0.0)


def _by_hand() -> tuple[list[int], dict[str, Any]]:
    batches = _batches()
    pipe = Pipeline(Small(), (batches[0],), stages=2, microbatches=2)
    sizes: list[int] = []
    for x in batches:
        pipe.step(x)
        with torch.no_grad():
            for p in pipe.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
                p.grad = None
        sizes = [p.numel() for p in pipe.parameters()]
    return sizes, pipe.state_dict()


def test_a_loop_without_an_optimizer() -> None:
    model = Small()
    for x in _batches():
        model(x).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
                p.grad = None
    first, second = run_ranks(2, _by_hand, timeout=120)
    assert sorted((first[0], second[0])) == [[0], [24, 4]]
    torch.testing.assert_close(first[1], dict(model.state_dict()), rtol=1e-9, atol=1e-12)
