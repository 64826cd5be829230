"""Compiled parts of a module, and compiled modules, are recorded as what they wrap."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from realistic import Base, build
from support.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.lightning.run_features import compiled_parts


def _compiled(what: Any) -> Any:
    return torch.compile(what, backend="eager")  # the import of the default one takes seconds


class Compiled(Base):
    """Parts that are compiled in every way that programs use."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = _compiled(nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16)))
        self.in_place = nn.Linear(16, 16)
        self.in_place.compile(backend="eager")
        self.forwarded = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.forwarded.forward = _compiled(self.forwarded.forward)
        self.last = nn.Linear(16, 2)
        self.twice = _compiled(lambda x: F.gelu(x) * 2)

    def configure_model(self):
        if not hasattr(self.last, "_orig_mod"):
            self.last = _compiled(self.last)

    def forward(self, x):
        return self.last(self.forwarded(self.in_place(self.twice(self.wrapped(x)))))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch), batch[:, :2])

    def validation_step(self, batch, batch_idx):
        self.log("x", self.training_step(batch, batch_idx))


def _fit(whole: bool, pipeline: bool) -> dict[str, Any]:
    _, train, val = build("boring")
    torch.manual_seed(0)
    module = Compiled().double()
    given = _compiled(module) if whole else module
    strategy = PipelineStrategy(stages=2, microbatches=3, split_at=["in_place"]) if pipeline else "auto"
    trainer = L.Trainer(strategy=strategy, devices=2 if pipeline else 1, max_steps=3, **QUIET)
    with torch.compiler.set_stance("default" if pipeline else "force_eager"):
        trainer.fit(given, train, val)
        trainer.validate(given, val, verbose=False)
        result = given(torch.ones(3, 32, dtype=torch.float64)).detach()
    return {**module.state_dict(), "x": trainer.callback_metrics["x"], "result": result}


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_parts_equal_one_device(whole: bool) -> None:
    expected = _fit(whole, False)
    for found in run_ranks(2, _fit, whole, True):
        assert list(found) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    assert "wrapped._orig_mod.0.weight" in expected


def test_compiled_parts_have_names() -> None:
    module = Compiled()
    module.configure_model()
    assert compiled_parts(module) == ["wrapped", "in_place", "last"]
