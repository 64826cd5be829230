"""Two jobs on one host that were told the same port do not meet: each of them trains."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.environment import job_environment

from pipepart.runtime.addresses import free_port

ROOT = Path(__file__).parents[2]

SCRIPT = """
    import pathlib, sys, time
    import lightning as L
    from pipepart import PipelineStrategy
    from support.lightning_modules import Module, loader

    folder = pathlib.Path(sys.argv[1])

    class Waiting(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1 and self.trainer.global_rank == 0:
                (folder / "trains").touch()
                until = time.monotonic() + 600
                while not (folder / "go on").exists() and time.monotonic() < until:
                    time.sleep(0.05)

    if __name__ == "__main__":
        trainer = L.Trainer(strategy=PipelineStrategy(stages=2, microbatches=2, timeout=600), devices=2, accelerator="cpu",
            max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Waiting("mlp"), loader("mlp", 64, 4))
        print("TRAINED", trainer.global_step)
"""


def _start(folder: Path, port: int) -> subprocess.Popen[str]:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env=job_environment(PYTHONPATH=path, MASTER_PORT=str(port)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_both_jobs_train(tmp_path: Path) -> None:
    port = free_port()
    first = _start(tmp_path / "first", port)
    second = None
    try:
        deadline = time.monotonic() + 360
        while not (tmp_path / "first" / "trains").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        second = _start(tmp_path / "second", port)
        (tmp_path / "second" / "go on").touch()
        for job in (second, first):
            said, _ = job.communicate(timeout=360)
            assert job.returncode == 0, said
            assert said.count("TRAINED") == 2, said  # lines of two processes may run into each other
            (tmp_path / "first" / "go on").touch()
    finally:
        for job in (first, second):
            if job is not None and job.poll() is None:
                os.killpg(job.pid, 9)
