"""The rehearsal of a plan: one figure for all ranks, and nothing of it stays."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.models import build
from support.ranks import run_ranks
from torch import nn

from pipepart.build.rehearsal import rehearsed
from pipepart.runtime import StepRequest


class _Noisy(nn.Module):
    """Whatever a step may change without being asked: running statistics, a counter, the random state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return self.second(self.first(x)).square().mean()


def _everything(pipe) -> list[torch.Tensor]:
    root = pipe.module
    state = [*root.parameters(), *root.buffers()]
    return [torch.get_rng_state(), *(tensor.detach().clone() for tensor in state if not tensor.is_meta)]


def _rehearse(replicas: int, gradients: bool) -> tuple[float, bool, bool]:
    from pipepart import Pipeline

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    pipe = Pipeline(_Noisy(), (x,), stages=2, replicas=replicas, microbatches=2)
    if gradients:
        pipe.step(x)
    before = _everything(pipe)
    own = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
    seconds = rehearsed(pipe._runtime, StepRequest(leaves=[x]), "step")
    same = all(torch.equal(a, b) for a, b in zip(before, _everything(pipe), strict=True))
    kept = all(
        p.grad is None if old is None else torch.equal(p.grad, old)
        for p, old in zip(pipe.parameters(), own, strict=True)
    )
    pipe._runtime.hand_over()  # nothing is left that could be handed over
    kept = kept and all((p.grad is None) == (old is None) for p, old in zip(pipe.parameters(), own))
    return seconds, same, kept


@pytest.mark.parametrize(
    ("replicas", "gradients"),
    [(1, True), pytest.param(1, False, marks=pytest.mark.slow), pytest.param(2, False, marks=pytest.mark.slow)],
)
def test_one_figure_for_all_ranks_and_nothing_stays(replicas: int, gradients: bool) -> None:
    answers = run_ranks(2 * replicas, _rehearse, replicas, gradients)
    assert len({seconds for seconds, _, _ in answers}) == 1
    assert answers[0][0] > 0
    for _, same, kept in answers:
        assert same
        assert kept


@pytest.mark.slow
def test_one_process() -> None:
    from pipepart import Pipeline

    model = build("gpt")
    batch = model.batch(4)
    pipe = Pipeline(model, batch, stages=1, microbatches=2)
    before = _everything(pipe)
    waited = []
    with mock.patch("pipepart.build.rehearsal.synchronize", waited.append):
        assert rehearsed(pipe._runtime, StepRequest(leaves=list(batch)), "step") > 0
    assert len(waited) >= 12, "an accelerator has finished before and after each step"
    assert all(torch.equal(a, b) for a, b in zip(before, _everything(pipe), strict=True))
