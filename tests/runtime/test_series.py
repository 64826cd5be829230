"""`Pipeline.evaluations`: outputs in order, equal to those of one process, whatever the batches are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import RanksFailed, run_ranks
from torch import nn

from pipepart import Pipeline
from pipepart.recording import record
from pipepart.runtime.executor import PreparedBatch
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.runtime.pace import _BYTES, Pace, joined, pace_of
from pipepart.runtime.program import Program


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


def _evaluated(series: bool, schedule: str, chunks: int, transport: Any) -> list[Any]:
    model, named = Noisy(8), chunks == 1
    example = next(iter(_batches(named)))
    args, kwargs = ((), example) if named else (example, {})
    pipe = Pipeline(
        model, args, kwargs, stages=2, microbatches=4, schedule=schedule, chunks=chunks, transport=transport
    )
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
@pytest.mark.parametrize(
    ("schedule", "chunks", "transport"),
    [("1f1b", 1, "auto"), ("1f1b", 1, "group"), ("interleaved", 2, "auto"), ("zb_v", 2, "group")],
)
def test_a_series_equals_one_batch_after_the_other(schedule: str, chunks: int, transport: str) -> None:
    """Also in their random numbers, which the number of the batch decides."""
    expected = run_ranks(2, _evaluated, False, schedule, chunks, transport)
    for found, wanted in zip(run_ranks(2, _evaluated, True, schedule, chunks, transport), expected):
        assert len(found) == len(wanted) == 12
        for mine, theirs in zip(found[:-1], wanted[:-1]):
            assert torch.equal(mine["x"], theirs["x"])
            assert torch.equal(mine["loss"], theirs["loss"])
            assert mine["rows"] == theirs["rows"] == len(mine["x"])  # a number of the whole batch
        assert float(found[-1]["x"].abs().max()) > 1.05  # the flag counts


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


def _plain(transport: Any = "auto") -> Pipeline:
    options: Any = {"stages": 3, "microbatches": 4, "schedule": "1f1b", "chunks": 1, "transport": transport}
    return Pipeline(Plain(), (torch.rand(8, 8),), split_at=["layers.1", "layers.2"], **options)


def _left_and_begun_again() -> None:
    pipe, model = _plain(), Plain()
    batches = [(torch.full((8, 8), float(number)),) for number in range(9)]
    expected = [model(*batch).detach() for batch in batches]
    early, other = pipe.evaluations(batches), pipe.evaluations(reversed(batches))
    assert torch.allclose(next(early), expected[0])
    assert torch.allclose(next(other), expected[8])
    assert torch.allclose(next(early), expected[1])
    assert torch.allclose(pipe.evaluate(*batches[3]), expected[3])
    early.close()
    for found, wanted in zip([*other], expected[7::-1], strict=True):
        assert torch.allclose(found, wanted)
    for found, wanted in zip(pipe.evaluations(batches), expected, strict=True):
        assert torch.allclose(found, wanted)


@pytest.mark.slow
def test_a_series_may_be_left_and_others_may_run_meanwhile() -> None:
    run_ranks(3, _left_and_begun_again)


def _updated_inside() -> None:
    pipe = _plain()
    for _ in pipe.evaluations((torch.rand(8, 8),) for _ in range(6)):
        with torch.no_grad():
            next(pipe.parameters()).mul_(2.0)


@pytest.mark.slow
def test_parameters_that_change_inside_the_loop_are_refused() -> None:
    with pytest.raises(RanksFailed, match="parameters have changed while 2 batches of `evaluations` were under way"):
        run_ranks(3, _updated_inside, timeout=120)


def _slow_at_the_end(transport: Any) -> tuple[int, int]:
    """The segments of shared memory that this rank has made, and the micro-batches that may be under way."""
    pipe, forward = _plain(transport), Program.forward

    def late(program: Program, *args: Any) -> Any:
        time.sleep(0.02)
        return forward(program, *args)

    if pipe.stage == 2:
        Program.forward = late
    try:
        count = len(list(pipe.evaluations((torch.rand(8, 8),) for _ in range(40))))
    finally:
        Program.forward = forward
    assert count == 40
    here: Any = pipe._runtime._transport
    pace = pipe._runtime.steps.programs["evaluate"].pace
    segments = sum(len(peer._mine) for peer in getattr(here, "_peers", {}).values())
    return segments, 4 * (pace.ahead + pace.window)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "group"])
def test_stages_in_front_of_a_slow_one_wait_for_it(transport: str) -> None:
    for segments, under_way in run_ranks(3, _slow_at_the_end, transport):
        assert segments <= 4 * under_way, "forty batches need no more memory than those under way"


def _raising(transport: Any, stage: int) -> None:
    pipe, forward, calls = _plain(transport), Program.forward, []

    def broken(program: Program, *args: Any) -> Any:
        calls.append(None)
        if len(calls) == 6:
            raise ValueError("the sixth batch is broken")
        return forward(program, *args)

    if pipe.stage == stage:
        Program.forward = broken
    try:
        list(pipe.evaluations((torch.rand(8, 8),) for _ in range(20)))
    finally:
        Program.forward = forward


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "stage"), [("shared_memory", 2), ("shared_memory", 0), ("group", 1)])
def test_a_rank_that_fails_ends_the_series_with_its_cause(transport: str, stage: int) -> None:
    with pytest.raises(RanksFailed, match="the sixth batch is broken"):
        run_ranks(3, _raising, transport, stage, timeout=120)


def _step(stages: int = 4, microbatches: int = 8, seconds: float = 0.1, **changed: Any) -> tuple[Any, Any]:
    recording = record(nn.Linear(4, 4).eval(), (torch.rand(2, 4),))
    step = SimpleNamespace(recording=recording, tail=None, weighed=SimpleNamespace(needs_totals=lambda train: False))
    traffic = [SimpleNamespace(forward_bytes=changed.pop("crossing", 100))]
    placement = tuple(range(stages)) * changed.pop("chunks", 1)
    plan = SimpleNamespace(
        stages=stages, microbatches=microbatches, replicas=1, traffic=traffic, step_time=seconds, placement=placement
    )
    options = SimpleNamespace(randomness="op", timeout=300.0)
    device = torch.device(changed.pop("device", "cpu"))
    step.__dict__.update(changed)
    return step, SimpleNamespace(plan=plan, options=options, device=device)


def test_the_pace() -> None:
    assert pace_of(*_step()) == Pace(1, 2)
    assert pace_of(*_step(microbatches=1)) == Pace(1, 4), "three batches are on their way to the last stage"
    assert pace_of(*_step(seconds=100.0)) == Pace(1, 2)
    assert pace_of(*_step(stages=1)) == pace_of(*_step(tail=object())) == Pace(1, 0)
    assert not Pace(1, 0).in_series
    assert pace_of(*_step(crossing=_BYTES / 8 / 2.5)) == Pace(1, 1), "two batches fit into the memory"
    assert pace_of(*_step(crossing=_BYTES)) == Pace(1, 0)


def test_the_window_of_several_chunks_and_of_accelerators() -> None:
    count = pace_of(*_step(device="cuda")).window
    work = count * 8
    assert 3 / (work + 3) <= 0.03 < 3 / (work - 8 + 3)
    assert pace_of(*_step(device="cuda")) == Pace(count, 0)
    assert pace_of(*_step(chunks=2)) == Pace(count, 2 * count)
    assert pace_of(*_step(chunks=2, seconds=10.0)).window == 3, "a tenth of the time limit of transfers"
    assert pace_of(*_step(chunks=2, crossing=_BYTES / 8 / 2.5)) == Pace(2, 0)
    assert pace_of(*_step(device="cuda", microbatches=1)).window == 32


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
