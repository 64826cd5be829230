"""Modules that are moved while the model runs: to where they are already, which changes nothing, or elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipepart.errors import CaptureError
from pipepart.recording import record


class Offloads(nn.Module):
    """Moves its experts between devices in its forward, as libraries do that keep unused ones in host memory."""

    def __init__(self, kind: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.experts, self.kind = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            expert.to(x.device, self.kind)
        return torch.stack([expert(x.to(self.kind)) for expert in self.experts]).pow(2).mean()


def test_a_module_that_is_there_already_is_not_moved() -> None:
    torch.manual_seed(0)
    model = Offloads().double()
    same = copy.deepcopy(model)
    recording = record(model, (torch.randn(2, 4, dtype=torch.float64),))
    assert not recording.leaves, "no expert is kept whole"
    x = torch.randn(3, 4, dtype=torch.float64)
    wanted, got = same(x), recording.module()(x)
    wanted.backward()
    got.backward()
    assert torch.equal(wanted, got)
    for ours, theirs in zip(model.parameters(), same.parameters()):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)


def test_other_values_for_a_parameter_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"Tensor\.data is assigned in .*Offloads"):
        record(Offloads(torch.float64), (torch.randn(2, 4),))
