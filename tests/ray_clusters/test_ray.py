"""Workers of a real cluster of Ray on this machine: fits, checkpoints, other shapes, a killed worker, datasets, recipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.environment import job_environment
from torch.utils.data import DistributedSampler

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
PATIENCE = 800  # seconds; a cluster of Ray is many processes, and takes minutes to start beside other work


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    program = str(Path(__file__).with_name("ray_program.py"))
    done = subprocess.run(
        [sys.executable, program, str(folder)], capture_output=True, text=True, timeout=PATIENCE, cwd=folder,
        env=job_environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return found


def _one_process(batches: list[list[int]]) -> tuple[dict[str, torch.Tensor], float]:
    """The weights after training on batches of these samples, and the loss over all samples."""
    from ray_program import Points, Regression

    module, data = Regression(), Points()
    optimizer = module.configure_optimizers()

    def loss(samples: Any) -> torch.Tensor:
        x, y = (torch.stack(parts) for parts in zip(*(data[index] for index in samples)))
        return torch.nn.functional.mse_loss(module.layers(x), y)

    for samples in batches:
        optimizer.zero_grad()
        loss(samples).backward()
        optimizer.step()
    with torch.no_grad():
        return dict(module.state_dict()), float(loss(range(len(data))))


def _check(answer: dict[str, Any], batches: list[list[int]]) -> float:
    expected, loss = _one_process(batches)
    assert "error" not in answer, answer["error"]
    for name, value in expected.items():
        found = torch.tensor(answer["weights"][name], dtype=torch.float64)
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)
    return loss


def _batches(replicas: int) -> list[list[int]]:
    """The samples of all replicas in each batch of three epochs. Lightning shuffles those of several replicas."""
    samplers: list[Any] = [range(32)]
    if replicas > 1:
        samplers = [DistributedSampler(range(32), replicas, replica) for replica in range(replicas)]  # type: ignore[type-var]
    batches, size = [], 8 // replicas
    for epoch in range(3):
        for sampler in samplers if replicas > 1 else ():
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        batches += [[i for part in parts for i in part[at : at + size]] for at in range(0, len(parts[0]), size)]
    return batches


@pytest.mark.parametrize(
    ("name", "shape", "resumed"),
    [("pipeline", [1, 2, 2], 0), ("other shape", [1, 3, 3], 1), ("killed", [1, 2, 2], 1), ("replicas", [2, 2, 4], 0)],
)
def test_equal_to_one_process(answers: dict[str, Any], name: str, shape: list[int], resumed: int) -> None:
    answer = answers[name]
    loss = _check(answer, _batches(shape[0]))
    assert answer["shape"] == shape
    assert answer["resumed"] == resumed
    assert answer["val_loss"] == pytest.approx(loss, rel=1e-9)
    assert answer["metrics"]["step"] == 12
    assert answer["metrics"]["val_loss"] == pytest.approx(loss, rel=1e-9)


def test_each_epoch_reports_a_checkpoint(answers: dict[str, Any]) -> None:
    """A plain one is a file that Lightning loads, a sharded one is a folder. Of a killed run, all of both lives are kept."""
    plain, sharded = answers["pipeline"]["checkpoints"], answers["killed"]["checkpoints"]
    assert [len(plain), len(sharded)] == [3, 3]
    assert all((Path(path) / "checkpoint.ckpt").is_file() for path in plain)
    assert all((Path(path) / "checkpoint.ckpt" / "manifest.json").is_file() for path in sharded)
    loaded = torch.load(Path(plain[0]) / "checkpoint.ckpt", weights_only=False)
    assert loaded["global_step"] == 4


def test_a_dataset_is_divided_among_replicas(answers: dict[str, Any]) -> None:
    answer = answers["data"]
    assert "error" not in answer, answer["error"]
    first, second, third, fourth = answer["seen"]
    assert (first, third) == (second, fourth), "the stages of a replica read the same"
    assert sorted(index for batch in first + third for index in batch) == list(range(32))
    _check(answer, [one + other for one, other in zip(first, third)])


def test_a_dataset_that_is_divided_among_workers_is_refused(answers: dict[str, Any]) -> None:
    assert "ReplicaDataConfig(stages=2)" in answers["data by rank"]["error"]


def test_what_does_not_fit_is_refused_by_name(answers: dict[str, Any]) -> None:
    assert "RayTrainReportCallback saves a checkpoint under another path on each rank" in answers["callback"]["error"]
    assert "SingleDeviceStrategy; expected pipepart.PipelineStrategy" in answers["strategy"]["error"]


def test_a_recipe(tmp_path: Path) -> None:
    """It goes on after a lost worker, and its report and checkpoints are in the folder of the run."""
    words = ["recipe=mlp", "launcher=ray", "devices=2", "trainer.max_steps=6", "logger=none", "output=run"]
    done = subprocess.run(
        [sys.executable, "-m", "pipepart.cli", "train", *words], capture_output=True, text=True, timeout=PATIENCE,
        cwd=tmp_path, env=job_environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "2 workers of Ray" in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["stages"]) == (6, 2)
    assert (tmp_path / "run" / "report.html").exists()
