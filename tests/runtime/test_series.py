"""`Pipeline.evaluations`: outputs in order, equal to those of one process, whatever the batches are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from pipepart import Pipeline
from pipepart.recording import record
from pipepart.runtime.executor import PreparedBatch
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.runtime.series import _BYTES, batches_together, joined


class Noisy(nn.Module):
    """Draws random numbers in evaluations too, and knows a flag that user code sets."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.twice = False
        self.double()

    def forward(self, x, y=None):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x + 0.1 * torch.randn_like(x)
        if self.twice:
            x = 2 * x
        return x.mean() if y is None else {"loss": (x - y).pow(2).mean(), "x": x, "rows": x.shape[0]}


def _batches(named: bool) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(3)
    for size in (8, 8, 8, 5, 8, 1, 8, 8, 16, 8, 3):
        x, y = torch.rand(2, size, 6, dtype=torch.float64, generator=generator)
        yield {"x": x, "y": y} if named else (x, y)


def _evaluated(series: bool, schedule: str, chunks: int) -> list[Any]:
    model, named = Noisy(8), chunks == 1
    example = next(iter(_batches(named)))
    args, kwargs = ((), example) if named else (example, {})
    pipe = Pipeline(model, args, kwargs, stages=2, microbatches=4, schedule=schedule, chunks=chunks)
    pipe.step(*args, **kwargs)
    if series:
        outputs = list(pipe.evaluations(_batches(named)))
    else:
        outputs = [pipe.evaluate(**b) if named else pipe.evaluate(*b) for b in _batches(named)]
    assert model.training
    assert pipe.evaluations_done == len(outputs)
    model.twice = True
    return [*outputs, next(pipe.evaluations([example]))]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_a_series_equals_one_batch_after_the_other(schedule: str, chunks: int) -> None:
    """Also in their random numbers, which the number of the batch decides."""
    expected = run_ranks(2, _evaluated, False, schedule, chunks)
    for found, wanted in zip(run_ranks(2, _evaluated, True, schedule, chunks), expected):
        assert len(found) == len(wanted) == 12
        for mine, theirs in zip(found[:-1], wanted[:-1]):
            assert torch.equal(mine["x"], theirs["x"])
            assert torch.equal(mine["loss"], theirs["loss"])
            assert mine["rows"] == theirs["rows"] == len(mine["x"])  # a number of the whole batch
        assert float(found[-1]["x"].abs().max()) > 1.05  # the flag counts


def _step(stages: int = 4, microbatches: int = 8, seconds: float = 0.1, **changed: Any) -> tuple[Any, Any]:
    recording = record(nn.Linear(4, 4).eval(), (torch.rand(2, 4),))
    step = SimpleNamespace(recording=recording, tail=None, weighed=SimpleNamespace(needs_totals=lambda train: False))
    traffic = [SimpleNamespace(forward_bytes=changed.pop("crossing", 100))]
    plan = SimpleNamespace(stages=stages, microbatches=microbatches, replicas=1, traffic=traffic, step_time=seconds)
    options = SimpleNamespace(randomness="op", timeout=300.0)
    step.__dict__.update(changed)
    return step, SimpleNamespace(plan=plan, options=options)


def test_the_number_of_batches_in_a_series() -> None:
    count = batches_together(*_step())
    work = count * 8
    assert 3 / (work + 3) <= 0.03 < 3 / (work - 8 + 3)
    assert batches_together(*_step(stages=1)) == 1
    assert batches_together(*_step(tail=object())) == 1
    assert batches_together(*_step(seconds=10.0)) == 3  # a tenth of the time limit of transfers
    assert batches_together(*_step(crossing=_BYTES / 8 / 2.5)) == 2
    assert batches_together(*_step(microbatches=1)) == 32


def test_batches_are_joined_in_order() -> None:
    one = PreparedBatch(
        MicrobatchSizes((2, 1)), (0, 1), {"a": 1.0, "b": (1.0, 2.0)}, 3, None, None, [{"x": 1}, {"x": 2}]
    )
    other = PreparedBatch(MicrobatchSizes((4,)), (2,), {"a": 5.0, "b": (3.0,)}, 4, None, None, [{"x": 3}])
    both = joined([one, other])
    assert both.sizes.sizes == (2, 1, 4)
    assert both.forms == (0, 1, 2)
    assert both.numbers == {"a": (1.0, 1.0, 5.0), "b": (1.0, 2.0, 3.0)}
    assert both.microbatches == [{"x": 1}, {"x": 2}, {"x": 3}]
