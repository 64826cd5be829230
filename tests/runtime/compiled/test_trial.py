"""`compile="auto"`: no compiler in short runs, and the faster form afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from pipepart import Pipeline
from pipepart.runtime.compiled import compiled_piece, trial
from pipepart.runtime.compiled.trial import BEFORE, PAIRS, Trial


def decided(as_it_is: float, compiled: float) -> tuple[list[bool], bool | None]:
    """The form of each step after a long run, with steps of these times."""
    one = Trial()
    assert not one.of_next(None)
    one.took(BEFORE, False, True)
    forms = []
    for _ in range(2 * PAIRS + 3):
        forms.append(one.of_next(None))
        one.took(compiled if forms[-1] else as_it_is, forms[-1], True)
    return forms, one.chosen


def test_both_forms_take_turns_and_the_faster_one_stays() -> None:
    forms, chosen = decided(1.0, 0.9)
    assert chosen is True
    assert forms == [True, *[False, True] * PAIRS, True, True]
    for compiled in (0.99, 1.5):
        forms, chosen = decided(1.0, compiled)
        assert chosen is False
        assert forms[-2:] == [False, False]


def test_short_runs_are_not_compiled() -> None:
    one = Trial()
    for _ in range(50):
        assert not one.of_next(None)
        one.took(BEFORE / 100, False, True)


def test_replicas_decide_together() -> None:
    several = [Trial() for _ in range(2)]

    total = [2 * BEFORE, 2.0, 3.0, 2.0, 4.0, 2.0]
    forms = [[one.of_next(lambda own: total) for _ in range(2 * PAIRS + 2)] for one in several]
    assert forms[0] == forms[1]
    assert all(one.chosen for one in several)


def trained(compile: Any, before: float) -> tuple[list[float], int, list[Any]]:
    """Losses, the number of compilations, and the gradients."""
    made = []
    plain = compiled_piece.compiled_function
    compiled_piece.compiled_function = lambda body, *_: made.append(1) or body  # type: ignore[assignment,func-returns-value]
    before, trial.BEFORE = trial.BEFORE, before
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)).double()

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.net(x).square().mean()

        x = torch.arange(16.0, dtype=torch.float64).reshape(4, 4) / 16
        stages = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        cuts = ["net.2"] if stages == 2 else []  # each chunk has ops that are worth a compiled function
        pipe = Pipeline(Loss(), (x,), stages=stages, microbatches=2, schedule="gpipe", compile=compile, split_at=cuts)
        made.clear()
        losses = [float(pipe.step(x + i)) for i in range(2 * PAIRS + 3)]
        losses.append(float(pipe.evaluate(x)))
    finally:
        compiled_piece.compiled_function, trial.BEFORE = plain, before
    return losses, len(made), [p.grad for p in model.parameters() if isinstance(p.grad, torch.Tensor)]


@pytest.mark.slow
def test_equal_in_both_forms() -> None:
    losses, _, gradients = trained(False, 0.0)
    found, compiled, own = trained("auto", 0.0)
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(own, gradients, rtol=1e-12, atol=0)
    assert compiled > 0
    assert trained("auto", 1e9)[1] == 0


@pytest.mark.slow
def test_all_stages_follow_the_first_one() -> None:
    for found, compiled, _ in run_ranks(2, trained, "auto", 0.0, timeout=600):
        assert compiled > 0
        torch.testing.assert_close(found, trained(False, 0.0)[0], rtol=1e-9, atol=0)
