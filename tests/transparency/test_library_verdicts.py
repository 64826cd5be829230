"""A quick part of the zoo of libraries: models of libraries that this environment has, and the verdicts of the bench."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from tools.bench.zoo.pipelines import Share, check_share, together


class Meets(nn.Module):
    """Samples meet in the middle of the network, so that no tail can help: `x / x.max()` over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x / x.abs().max()).pow(2).mean()


class Draws(Meets):
    """Adds noise, which the zoo cannot compare: other numbers are drawn for micro-batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x + torch.randn_like(x)).pow(2).mean()


OWN = {"meets": Meets, "draws": Draws}


def _share(name: str) -> Share:
    from tools.bench.zoo.libraries import ARCHITECTURES

    def own() -> Any:
        return OWN[name](), lambda n: (torch.randn(n, 4),)

    return check_share(own if name in OWN else ARCHITECTURES[name])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("einops.mixer", marks=pytest.mark.slow),
        "transformers.gpt2",
        pytest.param("transformers.llama", marks=pytest.mark.slow),
        pytest.param("timm.convnext", marks=pytest.mark.slow),
    ],
)
def test_equal_on_two_stages(name: str) -> None:
    shares = run_ranks(2, _share, name, timeout=200.0)
    assert together(shares) == ("equal", [])
    assert all(share.dtype in ("float64", "mixed") for share in shares)


@pytest.mark.timeout(240)
def test_a_flag_that_is_right_is_told_from_a_difference() -> None:
    kind, problems = together(run_ranks(2, _share, "meets", timeout=200.0))
    assert kind == "flagged"
    assert problems[0].startswith("gradients up to ") and ".weight)" in problems[0]
    assert "combines samples of a batch" in problems[1] and os.path.basename(__file__) in problems[1]
    kind, problems = together(run_ranks(2, _share, "draws", timeout=200.0))
    assert kind == "differs" and problems
