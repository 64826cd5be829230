"""`pipepart verify`: real processes, the table, and what is refused before any is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import job_environment

from pipepart.cli.main import main

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        z = self.net(x)
        return torch.logsumexp(z @ z.T, 1).mean()

def make():
    torch.manual_seed(0)
    return Model(), (torch.randn(8, 8),)
"""


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipepart.cli", "verify", *words],
        cwd=folder, capture_output=True, text=True, timeout=400, env=job_environment(),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_callable_on_two_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = _run(tmp_path, "mine:make", "strategy.stages=2", "strategy.microbatches=4")
    assert done.returncode == 0, done.stderr
    assert "whole batch" in done.stdout and "gradients of stage 1" in done.stdout and "schedule   gpipe" in done.stdout
    assert "matmul" in done.stderr and "mine.py" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_recipe_on_two_processes(tmp_path: Path) -> None:
    done = _run(tmp_path, "recipe=mlp", "model.width=16", "strategy.stages=2")
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert "verify     one process and the pipeline on" in text and "gradients of stage 1" in text
    assert not list(tmp_path.glob("outputs*"))


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("pipepart.cli.dry_runs.start_ranks", start)


def test_wrong_requests_are_told_before_a_process_starts(
    nothing_starts: None, capsys, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verified.py").write_text(MODEL)
    assert main(["verify", "verified:nothing"]) == 2
    assert "has no attribute 'nothing'" in capsys.readouterr().err
    assert main(["verify", "verified:make", "verified:Model"]) == 2
    assert "one module:callable at a time" in capsys.readouterr().err
    assert main(["verify", "strategy.stages=0"]) == 2
    assert main(["verify", "model._target_=os.system"]) == 2
    assert "allowed packages" in capsys.readouterr().err
