"""Cases in which other pipeline runtimes refuse, crash, hang or are silently wrong. Each is compared with one process.

Tied weights, skips by concatenation, batches that do not divide, smaller last batches, batch statistics, integer and
boolean edges and frozen parts are in `test_gradients` and `test_shapes`; ranks that raise are in `tests/faults`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import GPT, Dropping, build
from support.ranks import run_ranks
from support.reference import assert_close, reference_step
from torch import nn


class Language(GPT):
    """A GPT that takes any length up to 40."""

    def __init__(self) -> None:
        super().__init__(context=40)

    @staticmethod
    def of_length(samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 32, (samples, length))
        return x, x.roll(-1, 1)


def _pipeline(model: nn.Module, example: tuple, stages: int = 2, **options):
    from pipepart import Pipeline

    return Pipeline(model, example, stages=stages, microbatches=4, **options)


def _compare_step(pipe, plain: nn.Module, batch: tuple, sizes: list[int]) -> None:
    plain.zero_grad()
    for parameter in pipe.parameters():
        parameter.grad = None
    loss = pipe.step(*batch)
    assert_close("loss", loss, reference_step(plain, batch, sizes))
    expected = dict(plain.named_parameters())
    for key, parameter in pipe.named_parameters():
        assert_close(key, parameter.grad, expected[key].grad)


def _lengths() -> None:
    torch.manual_seed(0)
    model, plain = Language().double(), Language().double()
    plain.load_state_dict(model.state_dict())
    pipe = _pipeline(model, Language.of_length(8, 12))
    for length in (12, 20, 12, 31, 7):  # longer, shorter, and the first again
        _compare_step(pipe, plain, Language.of_length(8, length), [2, 2, 2, 2])
        batch = Language.of_length(4, length + 3)
        with torch.no_grad():
            assert_close("evaluation", pipe.evaluate(*batch), plain(*batch))


@pytest.mark.slow
def test_other_lengths_in_training_and_evaluation() -> None:
    run_ranks(2, _lengths)


def _dropout_in_evaluation() -> None:
    model, plain = build("dropping"), build("dropping")
    batch = Dropping.batch(8)
    pipe = _pipeline(model, batch)
    pipe.step(*batch)
    assert pipe.module.training
    with torch.no_grad():
        assert_close("evaluation", pipe.evaluate(*batch), plain.eval()(*batch))
    assert pipe.module.training


@pytest.mark.slow
def test_no_dropout_in_evaluation() -> None:
    run_ranks(2, _dropout_in_evaluation)


class Speaking(nn.Module):
    """Takes what is no tensor, changes its input in place at once, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, inputs: dict, scale: float, mode: str, weight: torch.Tensor | None = None) -> dict:
        h = inputs["x"] * 1
        for layer in self.layers:
            h = layer(h)
            h = h.mul_(scale) if mode == "in place" else h * scale
            h = h.relu_()
        loss = F.mse_loss(h, inputs["y"])
        return {"loss": loss, "prediction": h, "size": h.shape[0], "nothing": weight}


def _speaking() -> tuple:
    torch.manual_seed(0)
    model, plain = Speaking().double(), Speaking().double()
    plain.load_state_dict(model.state_dict())
    inputs = {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()}
    pipe = _pipeline(model, (inputs, 0.5, "in place"), stages=3)
    found = pipe.step(inputs, 0.5, "in place")
    expected = plain(inputs, 0.5, "in place")
    expected["loss"].backward()
    for key, parameter in pipe.named_parameters():
        assert_close(key, parameter.grad, dict(plain.named_parameters())[key].grad)
    assert_close("loss", found["loss"], expected["loss"])
    assert found["nothing"] is None
    if pipe.stage == 2:
        assert_close("prediction", found["prediction"], expected["prediction"].detach())
    else:
        assert found["prediction"] is None, "tensors stay on the last stage in training"
    everywhere = pipe.evaluate(inputs, 0.5, "in place")
    assert_close("evaluated", everywhere["prediction"], expected["prediction"].detach())
    return found["size"], list(found)


def test_dict_outputs_other_arguments_and_in_place_ops() -> None:
    answers = run_ranks(3, _speaking)
    assert all(keys == ["loss", "prediction", "size", "nothing"] for _, keys in answers)


class Counting(torch.autograd.Function):
    """Counts how many micro-batches wait for their backward."""

    alive, most = 0, 0

    @staticmethod
    def forward(ctx, x):
        Counting.alive += 1
        Counting.most = max(Counting.most, Counting.alive)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Counting.alive -= 1
        return gradient


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Counting.apply(torch.tanh(layer(x)))
        return x.pow(2).mean()


def _most_alive(schedule: str, microbatches: int) -> int:
    from pipepart import Pipeline

    cuts = ["layers.1", "layers.2"]
    pipe = Pipeline(
        Counted(), (torch.randn(16, 8),), stages=3, microbatches=microbatches, schedule=schedule, slack=0, split_at=cuts
    )
    Counting.alive = Counting.most = 0
    pipe.step(torch.randn(16, 8))
    assert Counting.alive == 0
    return Counting.most


@pytest.mark.parametrize("microbatches", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_activations_are_bounded_by_stages_not_by_microbatches(schedule: str, microbatches: int) -> None:
    found = run_ranks(3, _most_alive, schedule, microbatches)
    assert found == ([3, 2, 1] if schedule == "1f1b" else [microbatches] * 3)
