"""Replicas on a board: the mean is over those who have shown all of their stages, and all that are left agree on it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipepart.errors import PipelineError, PlanError
from pipepart.runtime.replica_board import ENDED, LOST, Board, Start, has_shown, write_whole_json
from pipepart.runtime.sync.board_mean import BoardMean

STEPS = 12


class _Killed(Exception):
    """The process of a rank is gone."""


def _mean(
    folder: Path, start: Start, replicas: int, stage: int = 0, stages: int = 1, timeout: float = 60.0
) -> BoardMean:
    return BoardMean(Board(folder, start, replicas, stage, stages, timeout), lambda: 7)


def _step(mean: BoardMean, gradients: dict[str, torch.Tensor | None], weight: float | None) -> dict[str, Any]:
    """The means of one step of a rank with these gradients."""
    parameters = {name: nn.Parameter(torch.zeros(3, dtype=torch.float64)) for name in gradients}
    mean.begin(parameters)
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    mean.weigh(weight)
    mean.finish()
    return {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def _together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(call) for call in calls]]


def _gradient(replica: int, stage: int, step: int) -> torch.Tensor:
    return torch.arange(3, dtype=torch.float64) + 100 * replica + 10 * stage + step


def test_the_mean_is_weighted_by_denominators(tmp_path: Path) -> None:
    one, other = (_mean(tmp_path, (replica, 0), 2) for replica in range(2))
    a, b = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([5.0, -1.0, 0.5]).double()
    found = _together(
        lambda: _step(one, {"both": a, "mine": a, "none": None}, 3.0),
        lambda: _step(other, {"both": b, "mine": None, "none": None}, 5.0),
    )
    for means in found:
        torch.testing.assert_close(means["both"], (3 * a + 5 * b) / 8, rtol=1e-15, atol=0)
        torch.testing.assert_close(means["mine"], 3 * a / 8, rtol=1e-15, atol=0)
        assert means["none"] is None
    assert torch.equal(found[0]["both"], found[1]["both"]), "equal to the last bit"


def test_a_replica_without_targets_has_no_weight(tmp_path: Path) -> None:
    one, other = (_mean(tmp_path, (replica, 0), 2) for replica in range(2))
    nothing = torch.full((3,), float("nan")).double()
    found = _together(lambda: _step(one, {"w": torch.ones(3).double()}, 4.0), lambda: _step(other, {"w": nothing}, 0.0))
    assert all(torch.equal(means["w"], torch.ones(3).double()) for means in found)


@pytest.mark.parametrize("seed", range(6))
def test_all_that_are_left_agree_wherever_a_replica_is_lost(tmp_path: Path, seed: int) -> None:
    """A rank of replica 1 is lost at a random place, and those that are left look at random times."""
    chance = random.Random(seed)
    replicas, stages, lost_in = 3, 2, chance.randrange(1, STEPS)
    killed = {stage: chance.random() < 0.5 for stage in range(stages)}  # before it has shown this step, or after
    left = threading.Barrier(stages + 1)

    def run(replica: int, stage: int) -> list[tuple[dict[int, int], torch.Tensor]]:
        mean, found = _mean(tmp_path, (replica, 0), replicas, stage, stages), []
        own = random.Random(100 * seed + 10 * replica + stage)
        for step in range(STEPS):
            time.sleep(own.random() * 0.004)
            last = replica == 1 and step == lost_in
            if last and not killed[stage]:

                def gone(*_: Any) -> Any:
                    raise _Killed

                mean.board.gather = gone  # type: ignore[method-assign]
            if last and killed[stage]:
                break
            try:
                got = _step(mean, {"w": _gradient(replica, stage, step)}, float(1 + replica))["w"]
            except _Killed:
                break
            found.append((dict(mean.board.members), got))
        if replica == 1:
            left.wait(60)
        return found

    def launcher() -> list[Any]:
        left.wait(60)  # all ranks of the replica are gone
        time.sleep(chance.random() * 0.01)
        write_whole_json(tmp_path / "lost", {LOST: [(1, 0)], ENDED: []})
        return []

    ranks = [(replica, stage) for replica in range(replicas) for stage in range(stages)]
    calls = [lambda r=replica, s=stage: run(r, s) for replica, stage in ranks]
    found = dict(zip(ranks, _together(*calls, launcher)))
    took_part = not any(killed.values())
    for replica, stage in ranks:
        if replica == 1:
            continue
        for step, (members, got) in enumerate(found[replica, stage]):
            there = [r for r in range(replicas) if r != 1 or step < lost_in + took_part]
            weights = sum(1 + r for r in there)
            expected = sum((1 + r) * _gradient(r, stage, step) for r in there) / weights
            torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)
            assert members == dict.fromkeys(there, 0), (step, lost_in)
        assert len(found[replica, stage]) == STEPS


def test_a_lost_replica_joins_after_a_step_on_which_all_agree(tmp_path: Path) -> None:
    """Twice, the second time as the first replica, whose place as the donor another one has taken."""
    replicas, stages, invited = 2, 2, threading.Event()
    write_whole_json(tmp_path / "lost", {LOST: [(0, 0)], ENDED: []})

    def stays(stage: int) -> list[tuple[int, float]]:
        mean = _mean(tmp_path, (1, 0), replicas, stage, stages)
        board, found = mean.board, []
        while len(found) < 4000 and (not found or found[-1][0] < 5):
            got = _step(mean, {"w": torch.ones(3).double()}, 1.0)["w"]
            together = sum(1 for _, value in found if value != 1) + int(got[0] != 1)
            found.append((together, float(got[0])))
            if board.joining is not None and board.start[0] == board.donor and stage == 0:
                assert board.joining == (0, 1)
                board.invite(f"after {board.step}")
                invited.set()
            time.sleep(0.002)
        return found

    def comes(stage: int) -> tuple[str, list[float]]:
        mean = _mean(tmp_path, (0, 1), replicas, stage, stages)
        mean.board.ready()
        if stage == 0:
            write_whole_json(tmp_path / "wish", {"replica": 0, "start": 1})
        state = mean.board.accept()
        assert mean.board.members == {0: 1, 1: 0}
        return state, [float(_step(mean, {"w": 3 * torch.ones(3).double()}, 1.0)["w"][0]) for _ in range(5)]

    first, second, one, other = _together(lambda: stays(0), lambda: stays(1), lambda: comes(0), lambda: comes(1))
    assert invited.is_set() and one[0] == other[0]
    assert one[1] == other[1] == [2.0] * 5
    assert first == second, "both stages have changed after the same step"
    assert [value for _, value in first][-5:] == [2.0] * 5 and {value for _, value in first[:-5]} == {1.0}
    assert has_shown(tmp_path, (0, 1), stages) and not has_shown(tmp_path, (0, 2), stages)


def test_what_replicas_decide_alone_must_be_equal(tmp_path: Path) -> None:
    one, other = (_mean(tmp_path, (replica, 0), 2) for replica in range(2))
    other._settings = lambda: 8

    def fails(mean: BoardMean) -> str:
        with pytest.raises(PipelineError) as raised:
            _step(mean, {"w": torch.ones(3).double()}, 1.0)
        return str(raised.value)

    texts = _together(lambda: fails(one), lambda: fails(other))
    assert all("has other learning rates, or another step of the optimizer than replica" in text for text in texts)


def test_parameters_are_compared_in_each_step(tmp_path: Path) -> None:
    means = [_mean(tmp_path, (replica, 0), 2) for replica in range(2)]

    def fails(mean: BoardMean, value: float) -> str:
        parameter = nn.Parameter(torch.full((3,), value))
        parameter.grad = torch.ones(3)
        mean.begin({"w": parameter})
        mean.weigh(1.0)
        with pytest.raises(PipelineError) as raised:
            mean.finish()
        return str(raised.value)

    texts = _together(lambda: fails(means[0], 1.0), lambda: fails(means[1], 1.0 + 2**-23))
    assert "replica 1 has other parameters than replica 0 in step 0" in texts[0]
    assert "replica 0 has other parameters than replica 1 in step 0" in texts[1]


def test_waits_have_an_end(tmp_path: Path) -> None:
    mean = _mean(tmp_path, (0, 0), 2, timeout=0.2)
    with pytest.raises(
        PipelineError, match=r"waited 0 s for the gradients of step 0 of replica 1 stage 0: stopped, stuck"
    ):
        _step(mean, {"w": torch.ones(3).double()}, 1.0)
    write_whole_json(tmp_path / "lost", {LOST: [], ENDED: [1]})
    with pytest.raises(PipelineError, match="replica 1 has ended its training, and replica 0 has not"):
        mean.board.gather(7, mean._form())
    write_whole_json(tmp_path / "lost", {LOST: [(0, 0)], ENDED: []})
    with pytest.raises(PipelineError, match="replica 0 was given up"):
        mean.board.gather(7, mean._form())


def test_a_loss_without_one_denominator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"lost_replica=continue .*\n.*one mean over samples or tokens"):
        _step(_mean(tmp_path, (0, 0), 1), {"w": torch.ones(3).double()}, None)
