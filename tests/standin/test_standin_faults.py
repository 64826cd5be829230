"""A rank that fails, is killed or is stuck in a step on devices: transfers neither raise nor return, and yet the job ends.

The other ranks end by themselves, within the ten seconds that `run_standin` gives them after the first failure.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from support.ranks import RanksFailed, run_standin


class Faulty(torch.nn.Module):
    """A chain of layers with a fault in the forward of the last one, in the third step of rank 1."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def _break(fault: str) -> None:
    if fault == "raise":
        raise ZeroDivisionError("the third step has a fault")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(9)


def _train(fault: str, timeout: float, victim: int) -> None:
    from pipepart import Pipeline

    model, batch = Faulty(fault).double(), torch.randn(8, 4, dtype=torch.float64)
    pipe = Pipeline(model, (batch,), stages=2, microbatches=4, schedule="1f1b", split_at=["layers.2"], timeout=timeout)
    for number in range(4):
        if number == 2 and pipe.stage == victim:
            layer = pipe.module.layers[2 if victim else 0]
            layer.weight.register_hook(lambda gradient: _break(fault))
        pipe.step(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "victim", "timeout", "told"),
    [
        ("raise", 0, 60.0, "ZeroDivisionError: the third step has a fault"),
        ("raise", 1, 60.0, "ZeroDivisionError: the third step has a fault"),
        ("kill", 0, 60.0, "has ended without leaving the job"),
        ("kill", 1, 60.0, "has ended without leaving the job"),
        ("stuck", 1, 4.0, "Ranks that wait:"),
    ],
)
def test_the_others_end_with_the_cause(fault: str, victim: int, timeout: float, told: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_standin(_train, fault, timeout, victim, ranks=2, timeout=60)
    text = str(failed.value)
    other = text.partition(f"rank {1 - victim}:\n")[2]
    assert told in other, text
    assert "did not finish in time" not in text or fault == "stuck", text
