"""Hooks that are registered on parameters see the gradient of the whole batch, once for each batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stateful import Auto, loaders
from support.ranks import run_ranks
from watching import assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy


class Clamped(Auto):
    """Nothing that could be done to the shares of micro-batches: a bound and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def on_fit_start(self) -> None:
        def count(gradient: torch.Tensor) -> None:
            self.calls += 1

        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            parameter.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        self.head.weight.register_hook(count)


def _fit(stages: int, **options: Any) -> Any:
    strategy: Any = "auto"
    if stages:
        split = ["body.2"] if stages > 1 else None
        strategy = PipelineStrategy(stages=stages, microbatches=4, schedule="1f1b", split_at=split)
    module = Clamped()
    return run_fit(module, *loaders(), strategy, max(1, stages), **options), module.calls


@pytest.mark.parametrize("accumulated", [1, 2])
def test_equal_to_one_device(accumulated: int) -> None:
    expected, calls = _fit(0, accumulate_grad_batches=accumulated)
    found, mine = _fit(1, accumulate_grad_batches=accumulated)
    assert mine == calls == 4
    assert_same_run(found, expected, "one stage")
    assert_same_state(found["state"], expected["state"], "one stage", 1e-10)


@pytest.mark.slow
def test_on_two_stages() -> None:
    expected, calls = _fit(0)
    answers = run_ranks(2, _fit, 2)
    assert sum(answer[1] for answer in answers) == calls
    for rank, (found, _) in enumerate(answers):
        assert_same_run(found, expected, f"rank {rank}")
    assert_same_state(answers[0][0]["state"], expected["state"], "two stages", 1e-10)
