"""Runs that start again after a failure, and the shape that they have with fewer machines. Hosts are in tests/hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_programs import end, path_with, start

from pipepart.cli.restarts import RESUME, SPARE, Restarts, last_checkpoint, resume_of_first, shape_left
from pipepart.spare_files import SPARE_FOLDER

MODULE = """
import os, pathlib, signal
from recipes.mlp import MLPModule

class Dies(MLPModule):
    def on_train_batch_start(self, batch, batch_idx):
        mark = pathlib.Path("died")
        if self.trainer.global_step == 6 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
WORDS = [
    "train",
    "recipe=mlp",
    "model._target_=dies.Dies",
    "allow=[dies]",
    "logger=none",
    "output=run",
    "trainer.max_steps=8",
]


@pytest.mark.slow
@pytest.mark.parametrize("failures", [0, 1])
def test_a_killed_rank(tmp_path: Path, failures: int) -> None:
    (tmp_path / "dies.py").write_text(MODULE)
    words = [*WORDS, "trainer.val_check_interval=4", "trainer.limit_val_batches=1", f"launcher.failures={failures}"]
    process = start(words, tmp_path, PYTHONPATH=path_with(tmp_path))
    said = end(process)
    assert "rank 1 was ended by SIGKILL" in said
    again = "restart 1 of 1, from run/checkpoints/last.ckpt" in said
    assert (process.returncode == 0, again) == (failures > 0,) * 2, said
    if failures:
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert (result["steps"], result["stages"]) == (8, 2)
        assert len(re.findall(r"^step ", said, re.MULTILINE)) >= 2


def _config(nodes: int, stages: Any, replicas: Any, batches: int | None = None) -> dict[str, Any]:
    return {
        "launcher": {"nodes": nodes},
        "strategy": {"stages": stages, "replicas": replicas, "plan": "plan.json"},
        "trainer": {"accumulate_grad_batches": batches, "val_check_interval": 100},
    }


@pytest.mark.parametrize(
    ("asked", "here", "left", "shape", "batches"),
    [
        ((2, 2, "auto"), 2, 1, (1, 2), 2),
        ((4, 2, 4), 2, 2, (2, 2), 2),
        ((2, 4, "auto"), 2, 1, (1, 2), 1),
        ((3, 2, "auto"), 2, 1, (1, 2), 3),
        ((3, 2, 3), 2, 2, (2, 2), None),
        ((4, 2, "auto"), 1, 3, (1, 3), 2),
    ],
    ids=str,
)
def test_shape_with_fewer_machines(
    monkeypatch: pytest.MonkeyPatch,
    asked: tuple[int, Any, Any],
    here: int,
    left: int,
    shape: tuple[int, int],
    batches: int | None,
) -> None:
    """Stages stay if they can, and so do the samples of a step; None: they cannot."""
    for name, value in (("WORLD_SIZE", here * left), ("LOCAL_WORLD_SIZE", here), ("RANK", 1)):
        monkeypatch.setenv(name, str(value))
    config = _config(*asked)
    found = shape_left(config)
    assert (found["strategy"]["replicas"], found["strategy"]["stages"]) == shape
    assert found["strategy"]["plan"] is None
    assert found["launcher"]["nodes"] == left
    assert found["trainer"]["accumulate_grad_batches"] == batches
    assert found["trainer"]["val_check_interval"] == 100 * (batches or 1)
    assert config["launcher"]["nodes"] == asked[0], "the given configuration stays"


def test_all_machines_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = _config(2, 2, 2)
    assert shape_left(config) is config
    assert "fewer" not in config["launcher"]


def test_machines_that_join_are_no_failure(tmp_path: Path) -> None:
    config = {"output": str(tmp_path), "resume": None, "launcher": {"failures": 0}}
    restarts = Restarts(config, tmp_path)
    last = last_checkpoint(config, tmp_path)
    last.parent.mkdir()
    last.write_bytes(b"")
    restarts.joined()
    assert restarts.begun_again
    assert restarts.config["resume"] == str(last)
    assert restarts.text.startswith("pipepart train: more machines have come")
    assert not restarts.another(), "a failure is still one too many"


def test_all_machines_resume_from_the_checkpoint_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"resume": "own.ckpt"}
    monkeypatch.setenv(RESUME, "first.ckpt")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of torchrun")
    assert resume_of_first(config) == config
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "pipepart")
    assert resume_of_first(config) == {"resume": "first.ckpt"}
    monkeypatch.setenv(RESUME, "")
    assert resume_of_first(config) == {"resume": None}


def test_the_state_in_memory_takes_the_place_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RESUME, "first.ckpt")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "pipepart")
    monkeypatch.setenv(SPARE_FOLDER, "/dev/shm/pipepart-spare-1-a")
    monkeypatch.setenv(SPARE, "")
    assert resume_of_first({"resume": None}) == {"resume": "first.ckpt"}
    monkeypatch.setenv(SPARE, "step-000000020-0123abcd")
    assert resume_of_first({"resume": None}) == {"resume": "/dev/shm/pipepart-spare-1-a/step-000000020-0123abcd"}
    launcher = {"failures": 2, "spare_state": "neighbour"}
    restarts = Restarts({"output": str(tmp_path), "resume": None, "launcher": launcher}, tmp_path)
    assert restarts.another()
    assert restarts.text.endswith("restart 1 of 2, from the state in memory if there is one, or the beginning")
    restarts.joined()
    assert restarts.after_checkpoint and "memory" not in restarts.text, "machines join at a checkpoint"
