"""The norm over the stages: each parameter counts once, in full precision, and all stages clip by the same number."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from pipepart.runtime import Groups, fit_mesh
from pipepart.runtime.gradients import clip_grad_norm, gradient_norm

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _with_gradients() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    made: dict[str, nn.Parameter] = {}
    for dtype in DTYPES:
        made[str(dtype)] = nn.Parameter(torch.zeros(7, 3, dtype=dtype))
        made[str(dtype)].grad = torch.randn(7, 3).to(dtype)
    table = nn.Embedding(5, 4, sparse=True)
    (table(torch.tensor([1, 3, 1])) * torch.arange(4.0)).sum().backward()
    made["sparse"] = table.weight
    made["unused"] = nn.Parameter(torch.zeros(2))
    return made


def _reference(parameters: dict[str, nn.Parameter]) -> float:
    dense = [p.grad.to_dense() for p in parameters.values() if p.grad is not None]
    return float(sum(g.double().pow(2).sum() for g in dense).sqrt())


def test_the_norm_of_gradients_of_every_kind() -> None:
    parameters = _with_gradients()
    norm = gradient_norm(list(parameters.values()), None, CPU)
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(_reference(parameters), rel=1e-6)
    assert float(gradient_norm([], None, CPU)) == 0.0


def _clip(max_norm: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Two stages that share a float32 parameter, which the first one counts; one holds 16-bit and sparse gradients."""
    groups = Groups.create(fit_mesh(2, 2, 1), timedelta(seconds=60))
    parameters, tied = _with_gradients(), str(DTYPES[0])
    homes = {name: 0 if name in (tied, str(DTYPES[1])) else 1 for name in parameters}
    counted = [p for name, p in parameters.items() if homes[name] == groups.stage]
    held = {name: p for name, p in parameters.items() if homes[name] == groups.stage or name == tied}
    norm = clip_grad_norm(counted, list(held.values()), max_norm, groups.pipeline, CPU)
    return float(norm), {name: p.grad.to_dense() for name, p in held.items() if p.grad is not None}


def test_two_stages_clip_as_one_process() -> None:
    for max_norm in (0.5, 1e9):
        (norm, first), (other, second) = run_ranks(2, _clip, max_norm, timeout=300)
        parameters = _with_gradients()
        expected = _reference(parameters)
        assert norm == other == pytest.approx(expected, rel=1e-6)
        assert torch.equal(first[str(DTYPES[0])], second[str(DTYPES[0])])
        scale = min(1.0, max_norm / (expected + 1e-6))
        for name, gradient in {**first, **second}.items():
            given = parameters[name].grad
            assert given is not None
            rounding = 1e-6 if gradient.dtype in (torch.float32, torch.float64) else 1e-2
            torch.testing.assert_close(gradient.double(), given.to_dense().double() * scale, rtol=rounding, atol=1e-7)
