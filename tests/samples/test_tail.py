"""Samples that meet after the network: loss, outputs, gradients and buffers are those of one process on the whole batch."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from support.mixers import MIXERS, VQVAE
from support.ranks import run_ranks

from pipepart.errors import PlanError

MODELS = {**MIXERS, "vqvae": VQVAE}


def _build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().double()


def _batch(model: Any, size: int, seed: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return tuple(t.double() if t.is_floating_point() else t for t in model.batch(size))


def _values(result: Any) -> dict[str, torch.Tensor]:
    return result if isinstance(result, dict) else {"loss": result}


def _pipeline(name: str, stages: int, sizes: tuple[int, ...], **options: Any):
    from pipepart import Pipeline

    model = _build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = Pipeline(model, _batch(model, 8, 1), stages=stages, microbatches=4, **options)
    steps = []
    for index, size in enumerate(sizes):
        result = pipe.step(*_batch(model, size, 10 + index))
        gradients = {key: p.grad.clone() for key, p in pipe.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for _, parameter in pipe.named_parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        steps.append((_values(result), gradients, {key: value.clone() for key, value in model.named_buffers()}))
    evaluated = _values(pipe.evaluate(*_batch(model, 7, 99)))
    return steps, evaluated


@cache
def _one_process(name: str, sizes: tuple[int, ...]):
    model = _build(name)
    steps = []
    for index, size in enumerate(sizes):
        model.zero_grad()
        result = _values(model(*_batch(model, size, 10 + index)))
        result["loss"].backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        buffers = {key: value.clone() for key, value in model.named_buffers()}
        steps.append(({key: value.detach() for key, value in result.items()}, gradients, buffers))
    model.eval()
    return steps, {key: value.detach() for key, value in _values(model(*_batch(model, 7, 99))).items()}


def _same(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    assert torch.allclose(a, b, rtol=1e-9, atol=1e-10), f"{what}: {(a - b).abs().max():.3g}"


def _check(name: str, stages: int, **options: Any) -> None:
    sizes = (8, 10, 3)  # even, uneven, and smaller than the number of micro-batches
    wanted, evaluation = _one_process(name, sizes)
    answers = run_ranks(stages, _pipeline, name, stages, sizes, **options)
    for index in range(len(sizes)):
        seen = set()
        for steps, _ in answers:
            values, gradients, buffers = steps[index]
            for key, value in wanted[index][0].items():
                _same(values[key], value, f"{key} of step {index}")
            for key, gradient in gradients.items():
                _same(gradient, wanted[index][1][key], f"gradient of {key} in step {index}")
            seen |= set(gradients)
            for key, value in wanted[index][2].items():
                _same(buffers[key], value, f"buffer {key} after step {index}")
        assert seen == set(wanted[index][1])
    for _, values in answers:
        for key, value in evaluation.items():
            _same(values[key], value, f"{key} in eval mode")


QUICK = {("simclr", 2), ("clip", 1)}
NAMES = [name for name in MODELS if name != "packed_tokens"]
THOROUGH = ("simclr", "clip", "barlow_twins", "vicreg", "supcon", "mmd", "vqvae")
SHAPES = (1, 2, 3)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(name, stages, marks=[] if (name, stages) in QUICK else [pytest.mark.slow])
        for name in NAMES
        for stages in (SHAPES if name in THOROUGH else (2,))
    ],
)
def test_equal_to_one_process_on_the_whole_batch(name: str, stages: int) -> None:
    _check(name, stages)


@pytest.mark.slow
def test_with_recomputation() -> None:
    _check("barlow_twins", 2, recompute=True)


def _replicas() -> Any:
    from pipepart import Pipeline

    model = _build("clip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = Pipeline(model, _batch(model, 8, 1), stages=2, replicas=2, microbatches=4)
    replica = pipe._runtime.groups.replica
    loss = pipe.step(*_batch(model, 8, 20 + replica))
    return replica, loss, {key: p.grad.clone() for key, p in pipe.named_parameters()}


@pytest.mark.slow
def test_each_replica_has_a_tail_of_its_own() -> None:
    model = _build("clip")
    losses = [model(*_batch(model, 8, 20 + replica)) for replica in range(2)]
    (sum(losses) / 2).backward()
    wanted = {key: p.grad for key, p in model.named_parameters()}
    for replica, loss, gradients in run_ranks(4, _replicas):
        _same(loss, losses[replica].detach(), f"loss of replica {replica}")
        for key, gradient in gradients.items():
            _same(gradient, wanted[key], key)


def _refused(schedule: str) -> str:
    with pytest.raises(PlanError) as caught:
        _pipeline("clip", 2, (8,), schedule=schedule)
    return str(caught.value)


def test_a_schedule_that_does_not_wait_is_refused_by_name() -> None:
    for text in run_ranks(2, _refused, "1f1b"):
        assert "1f1b" in text and "gpipe" in text and "matmul" in text and "mixers.py" in text
