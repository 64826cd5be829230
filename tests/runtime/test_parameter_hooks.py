"""Hooks of parameters see the gradient of the whole batch, as in one process."""

from __future__ import annotations

import pytest
import torch
from support.models import MLP
from support.ranks import run_ranks
from support.reference import assert_close
from torch import nn

from pipepart import Pipeline
from pipepart.errors import PipelineError


def _model() -> nn.Module:
    """A model whose gradients are clipped by hooks; one of them is looked at."""
    torch.manual_seed(0)
    model = MLP().double()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model.head.weight.register_hook(lambda gradient: None)
    return model


def _batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return MLP.batch(12)


def _gradients(stages: int, schedule: str) -> dict[str, torch.Tensor]:
    cut = {"split_at": ["layers.4"]} if stages == 2 else {}
    pipe = Pipeline(_model(), _batch(), stages=stages, microbatches=4, schedule=schedule, **cut)  # type: ignore[arg-type]
    for _ in range(2):
        pipe.step(*_batch())
    assert all(len(p._backward_hooks or ()) >= 1 for p in pipe.parameters())
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "replicas", "schedule"), [(1, 2, "gpipe"), (2, 1, "zb_h1")])
def test_hooks_see_gradients_of_the_whole_batch(stages: int, replicas: int, schedule: str) -> None:
    model = _model()
    for _ in range(2):
        model(*_batch()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert any(float(g.abs().max()) == 0.02 for g in expected.values()), "the hooks clip"
    for found in run_ranks(stages * replicas, _gradients, stages, schedule, timeout=120):
        assert found
        for name, gradient in found.items():
            assert_close(name, gradient, expected[name])


def test_updates_inside_of_backward_are_refused() -> None:
    model = MLP().double()
    for microbatches in (1, 2):
        pipe = Pipeline(model, _batch(), stages=1, microbatches=microbatches, schedule="gpipe")
        seen: list[nn.Parameter] = []
        handle = model.head.weight.register_post_accumulate_grad_hook(seen.append)
        if microbatches == 1:
            pipe.step(*_batch())
            assert seen == [model.head.weight]
        else:
            with pytest.raises(PipelineError, match=r"'head.weight' has a hook of register_post_accumulate_grad_hook"):
                pipe.step(*_batch())
        handle.remove()


def test_accumulated_batches_are_refused() -> None:
    pipe = Pipeline(_model(), _batch(), stages=1, microbatches=2, schedule="gpipe")
    with pytest.raises(PipelineError, match=r"has a hook \(register_hook\), and the gradients of accumulated batches"):
        pipe.steps([_batch(), _batch()])
    pipe.step(*_batch())
