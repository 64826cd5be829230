"""The numbers of micro-batches that are measured where the number is free."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipepart.build.agreement import MeasuredCount, measured_counts
from pipepart.cost import profile
from pipepart.recording import record


class _Net(nn.Module):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), *more, nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _measured(model: nn.Module, batch: int, size: int, ok: bool = True) -> list[MeasuredCount]:
    x = torch.randn(size, 8)
    recording = record(model, (x,), {})
    usual = MeasuredCount(batch // size, size, profile(recording, [x]))
    return measured_counts(usual, recording, [x], batch, 2, torch.enable_grad, lambda mine: mine and ok)


def test_other_sizes_are_measured_as_a_whole() -> None:
    usual, *others = _measured(_Net(), 32, 4)
    assert [(count.microbatches, count.size) for count in others] == [(4, 8), (16, 2)]
    for count in others:
        assert count.costs.parameter_bytes == usual.costs.parameter_bytes
        assert sum(count.costs.saved_bytes) == pytest.approx(sum(usual.costs.saved_bytes) * count.size / 4, rel=0.05)
        assert sum(count.costs.forward) > 0
        shares = [f / sum(count.costs.forward) for f in count.costs.forward]
        assert shares == pytest.approx([f / sum(usual.costs.forward) for f in usual.costs.forward])


def test_the_next_number_that_is_another_one_is_measured() -> None:
    """Two and four micro-batches per stage are the same where the batch is small."""
    _, *others = _measured(_Net(), 4, 1)
    assert [(count.microbatches, count.size) for count in others] == [(2, 2)]


def test_all_ranks_must_have_measured_it() -> None:
    assert len(_measured(_Net(), 32, 4, ok=False)) == 1


def test_no_stopwatch_chooses_what_batch_norm_sees() -> None:
    assert len(_measured(_Net(nn.BatchNorm1d(64)), 32, 4)) == 1
