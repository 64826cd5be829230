"""The division of chunks into compiled pieces, and what runs as it is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipepart import Pipeline
from pipepart.errors import ConfigError
from pipepart.runtime.compiled import NotCompiled

EAGER = {"backend": "aot_eager"}


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * 3


class Net(nn.Module):
    """A function with a backward of its own stands between ops that can be compiled."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two, self.drop = nn.Linear(5, 5), nn.Linear(5, 5), nn.Dropout(0.3)
        self.over = nn.GRU(5, 5, batch_first=True) if recurrent else None
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Own.apply(F.gelu(self.one(x)) + 1)
        h = self.over(h)[0] if self.over is not None else h
        return self.two(self.drop(F.silu(h))).square().mean()


def run(compile: Any, recurrent: bool = False, **options: Any) -> tuple[list[float], dict[str, Any], list[str]]:
    torch.set_num_threads(1)
    model = Net(recurrent)
    torch.manual_seed(5)
    x = torch.arange(60.0, dtype=torch.float64).reshape(4, 3, 5) / 60
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = Pipeline(model, (x,), stages=1, microbatches=2, schedule="gpipe", compile=compile, **options)
        losses = [float(pipe.step(x + i)) for i in range(3)]
    notes = [str(item.message) for item in caught if issubclass(item.category, NotCompiled)]
    return losses, {n: p.grad for n, p in model.named_parameters()}, notes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"recurrent": True}, {"randomness": "stage"}, {"batch_norm": "batch"}], ids=str
)
def test_pieces_around_ops_that_stay_outside(options: dict[str, Any]) -> None:
    losses, gradients, _ = run(False, **options)
    found, own, notes = run(EAGER, **options)
    assert notes == []
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(own, gradients, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipepart.runtime.compiled import compiled_piece

    def fails(*_: Any) -> Any:
        raise RuntimeError("no such code\nmore")

    losses, gradients, _ = run(False)
    monkeypatch.setattr(compiled_piece, "compiled_function", fails)
    found, own, notes = run(EAGER)
    assert found == losses
    assert all(torch.equal(own[name], gradient) for name, gradient in gradients.items())
    assert notes == ["compile: a part of chunk 0 runs as it is: RuntimeError: no such code"]
    with pytest.raises(RuntimeError, match="no such code"):
        run({**EAGER, "fullgraph": True})


def test_settings_that_inductor_does_not_have_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="'max_autotun', which is no setting of inductor; did you mean 'max_autotune'"
    ):
        run({"options": {"max-autotun": True}})


@pytest.mark.slow
def test_layers_with_hooks_run_as_they_are() -> None:
    torch.set_num_threads(1)
    model, seen = Net(), []
    x = torch.ones(4, 3, 5, dtype=torch.float64)
    pipe = Pipeline(model, (x,), stages=1, microbatches=2, schedule="gpipe", compile=EAGER)
    pipe.step(x)
    model.two.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(NotCompiled, match="a hook"):
        pipe.step(x)
    assert len(seen) == 2


@pytest.mark.slow
def test_attributes_of_layers_that_are_tuples_are_read_at_each_step() -> None:
    def trained(compile: Any) -> list[Any]:
        torch.set_num_threads(1)
        torch.manual_seed(2)
        conv = nn.Conv1d(3, 3, 3, padding=1)
        model = nn.Sequential(conv, nn.GELU(), nn.Conv1d(3, 3, 1), nn.GELU(), nn.Flatten(), nn.Linear(15, 1)).double()
        x = torch.arange(60.0, dtype=torch.float64).reshape(4, 3, 5) / 60
        pipe = Pipeline(model, (x,), stages=1, microbatches=2, schedule="gpipe", compile=compile)
        found = [pipe.evaluate(x)]
        conv.padding, conv.dilation = (2,), (2,)
        return [*found, pipe.evaluate(x)]

    expected = trained(False)
    assert not torch.allclose(*expected)
    torch.testing.assert_close(trained(EAGER), expected, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_changes_between_steps_are_seen() -> None:
    def trained(compile: Any) -> list[Any]:
        torch.set_num_threads(1)
        model = Net()
        x = torch.ones(4, 3, 5, dtype=torch.float64)
        pipe = Pipeline(model, (x,), stages=1, microbatches=2, schedule="gpipe", compile=compile)
        found = [float(pipe.step(x))]
        model.drop.p = 0.6
        found.append(float(pipe.step(x)))
        model.one.requires_grad_(False)
        model.one.weight.grad = None
        found.append(float(pipe.step(x)))
        with torch.no_grad():
            model.two.weight.mul_(2)
        model.two.bias = nn.Parameter(torch.ones_like(model.two.bias))
        found += [float(pipe.step(x)), float(pipe.evaluate(x)), model.one.weight.grad]
        return found

    torch.testing.assert_close(trained(EAGER), trained(False), rtol=1e-12, atol=0)
