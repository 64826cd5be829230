"""Times on a device whose work goes on while the host continues: marks in its queue, read after one wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipepart.cost import profile, timing
from pipepart.devices import Stopwatch
from pipepart.recording import record


class Queue:
    """A stand-in for `Stopwatch` on an accelerator: marks are numbers, 1 ms apart, and reading one is a wait."""

    def __init__(self) -> None:
        self.marks = 0
        self.waits: list[int] = []

    def __call__(self, device: torch.device) -> Queue:
        return self

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def between(self, start: int, end: int) -> float:
        if not self.waits or self.waits[-1] != self.marks:
            self.waits.append(self.marks)  # reading several marks at one moment is one wait
        return (end - start) / 1000


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(timing, "Stopwatch", made)
    monkeypatch.setattr(timing, "computes_on_host", lambda device: False)
    return made


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def recorded() -> tuple[Any, list[Any]]:
    x = torch.randn(4, 8)
    recording = record(Loss(), (x,))
    return recording, recording.flatten((x,))


def test_a_step_is_waited_for_twice(queue: Queue) -> None:
    recording, leaves = recorded()
    forward, backward = timing.time_step(recording.graph_module(), leaves, recording.loss_index, timing.nullcontext)
    assert (forward, backward) == (pytest.approx(1e-3), pytest.approx(1e-3))
    assert queue.marks == 4 * 100, "the most repeats: they take 2 ms each of a budget of 1.5 s"
    assert len(queue.waits) == 2, "one wait to learn how long a step takes, one at the end"


def test_a_slow_step_is_repeated_as_often_as_the_budget_allows(queue: Queue) -> None:
    recording, leaves = recorded()
    timing.time_step(recording.graph_module(), leaves, recording.loss_index, timing.nullcontext, (3, 50), 0.02)
    assert queue.marks == 4 * 11, "11 steps of 2 ms use the budget"


def test_an_op_is_waited_for_at_most_twice(queue: Queue) -> None:
    recording, leaves = recorded()
    costs = profile(recording, leaves)
    linears = [i for i, size in enumerate(costs.parameter_bytes) if size]
    assert len(linears) == 3
    assert len(queue.waits) <= 2 * len(costs) + 2
    assert queue.marks > 20 * len(queue.waits) / 2
    assert costs.forward[linears[1]] == costs.forward[linears[2]] > 0
    assert costs.backward_weight[linears[1]] >= 0


def test_times_of_the_host_are_known_at_once() -> None:
    timer = timing.Timer(torch.device("cpu"))
    one: list[float] = []
    other: list[float] = []
    timer.stop(timer.start(), one, other)
    assert one == other
    assert len(one) == 1


def test_the_seconds_between_two_marks() -> None:
    watch = Stopwatch(torch.device("cpu"))
    first, second = watch.mark(), watch.mark()
    assert watch.between(first, second) == second - first >= 0


def test_the_accelerator_among_several_tensors_is_measured() -> None:
    with torch.device("meta"):
        elsewhere = torch.zeros(2)
    assert timing.device_under([1, torch.zeros(2), elsewhere]) == torch.device("meta")
    assert timing.device_under([torch.zeros(2)]) == timing.device_under([]) == torch.device("cpu")
