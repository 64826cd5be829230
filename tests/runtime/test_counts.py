"""The number of micro-batches that is chosen where it is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from pipepart.build.counts import Cut, best_cut, measured_cuts
from pipepart.cost import profile
from pipepart.errors import PartitionError
from pipepart.recording import record


@dataclass
class _Planned:
    step_time: float


def _cuts(*counts: int) -> list[Any]:
    return [Cut(count, 1, None) for count in counts]  # type: ignore[arg-type]


def _chosen(seconds: dict[int, float]) -> int:
    def plan(cut: Cut) -> Any:
        if seconds[cut.microbatches] <= 0:
            raise PartitionError(f"{cut.microbatches} do not fit")
        return _Planned(seconds[cut.microbatches])

    return best_cut(_cuts(*seconds), plan)[1].microbatches


def test_the_usual_number_unless_another_is_clearly_faster() -> None:
    assert _chosen({8: 1.0, 4: 0.98, 16: 1.2}) == 8
    assert _chosen({8: 1.0, 4: 0.9, 16: 0.95}) == 4


def test_what_fits_into_memory_is_taken_and_the_first_refusal_said() -> None:
    assert _chosen({8: 0.0, 4: 0.0, 16: 3.0}) == 16
    with pytest.raises(PartitionError, match="8 do not fit"):
        _chosen({8: 0.0, 4: 0.0})


class _Net(nn.Module):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), *more, nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _measured(model: nn.Module, batch: int, size: int, ok: bool = True) -> list[Cut]:
    x = torch.randn(size, 8)
    recording = record(model, (x,), {})
    usual = Cut(batch // size, size, profile(recording, [x]))
    return measured_cuts(usual, recording, [x], batch, 2, torch.enable_grad, lambda mine: mine and ok)


def test_other_sizes_are_measured_as_a_whole() -> None:
    usual, *others = _measured(_Net(), 32, 4)
    assert [(cut.microbatches, cut.size) for cut in others] == [(4, 8), (16, 2)]
    for cut in others:
        assert cut.costs.parameter_bytes == usual.costs.parameter_bytes
        assert sum(cut.costs.saved_bytes) == pytest.approx(sum(usual.costs.saved_bytes) * cut.size / 4, rel=0.05)
        assert sum(cut.costs.forward) > 0
        shares = [f / sum(cut.costs.forward) for f in cut.costs.forward]
        assert shares == pytest.approx([f / sum(usual.costs.forward) for f in usual.costs.forward])


def test_all_ranks_must_have_measured_it() -> None:
    assert len(_measured(_Net(), 32, 4, ok=False)) == 1


def test_no_stopwatch_chooses_what_batch_norm_sees() -> None:
    assert len(_measured(_Net(nn.BatchNorm1d(64)), 32, 4)) == 1
