"""Python state of a model in a plain PyTorch loop: a change between two steps counts from the next step on."""

from __future__ import annotations

import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from pipepart import Pipeline
from pipepart.errors import PipepartError


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.skip = nn.Linear(6, 6), 1.0, False

    def forward(self, x):
        y = torch.tanh(self.linear(x)) * self.scale
        return x + y if self.skip else y


class Model(nn.Module):
    """Returns its loss; what it weighs by is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gates = nn.ModuleList(Gate() for _ in range(4))
        self.head = nn.Linear(6, 2)
        self.beta, self.hp, self.cfg = 0.0, SimpleNamespace(kind="l2"), {"weights": [1.0, 0.0]}
        self.steps = 0
        self.double()

    def forward(self, x, y):
        h = x
        for gate in self.gates:
            h = gate(h)
        error = self.head(h) - y
        loss = error.pow(2).mean() if self.hp.kind == "l2" else error.abs().mean()
        if self.steps > 3:
            loss = loss * 2
        return loss * self.cfg["weights"][0] + (self.beta + self.cfg["weights"][1]) * h.pow(2).mean()


def _set(model: Model, step: int) -> None:
    model.beta = 0.1 * step
    model.steps += 1
    model.gates[2].scale, model.gates[1].skip = 1 + step / 10, step in (2, 3)
    model.hp = SimpleNamespace(kind="l2" if step % 4 < 2 else "l1")
    model.cfg["weights"][1] = 0.01 * step


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)


def _reference(steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, evaluated = [], []
    for step in range(steps):
        _set(model, step)
        loss = model(*_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        evaluated.append(float(model(*_batch(99))))
    return losses, evaluated, model.state_dict()


def _pipeline(steps: int, stages: int) -> Any:
    model = Model()
    pipe = Pipeline(
        model, _batch(0), stages=stages, microbatches=3, schedule="1f1b", split_at=["gates.2"] if stages > 1 else None
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses, evaluated = [], []
    for step in range(steps):
        _set(model, step)
        losses.append(float(pipe.step(*_batch(step))))
        optimizer.step()
        optimizer.zero_grad()
        evaluated.append(float(pipe.evaluate(*_batch(99))))
    return losses, evaluated, pipe.state_dict(), {key: value.made for key, value in pipe._variants.items()}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_equal_to_one_process(stages: int) -> None:
    losses, evaluated, state = _reference(8)
    answers = run_ranks(stages, _pipeline, 8, stages)
    for got, seen, _, made in answers:
        assert got == pytest.approx(losses, rel=1e-9)
        assert seen == pytest.approx(evaluated, rel=1e-9)
        assert made["step"] <= 7, made  # the decisions above, and not one for each step
    for name, value in state.items():
        torch.testing.assert_close(answers[0][2][name], value, rtol=1e-9, atol=1e-12)


class Shared(nn.Module):
    """Fills a list of its class, or one of its own."""

    seen: list[Any] = []

    def __init__(self, private: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self._window, self.private = deque(maxlen=2), private
        self.double()

    def forward(self, x, y):
        out = self.layers(x)
        (self._window if self.private else self.seen).append(out.detach())
        return (out[:, :2] - y).pow(2).mean()


def _refused() -> list[str]:
    found = []
    for private in (True, False):
        try:
            Pipeline(Shared(private), _batch(0), stages=2, microbatches=2)
            found.append("nothing was raised")
        except PipepartError as error:
            found.append(str(error))
    return found


def test_containers_that_a_model_fills_are_refused_by_name() -> None:
    for private, shared in run_ranks(2, _refused):
        assert "'_window'" in private
        assert "'seen'" in shared


def _different() -> str:
    model = Model()
    pipe = Pipeline(model, _batch(0), stages=2, microbatches=3, timeout=60)
    pipe.step(*_batch(0))
    model.hp.kind = "l1" if int(os.environ["RANK"]) == 0 else "l2"
    try:
        pipe.step(*_batch(1))
    except PipepartError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_that_differ_are_refused_by_name() -> None:
    for answer in run_ranks(2, _different):
        assert "self.hp.kind is 'l1' on stage 0 and 'l2' on stage 1" in answer
