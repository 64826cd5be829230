"""A parent that is killed takes its ranks with it, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from support.environment import job_environment

from pipepart.parent import tied

ROOT = Path(__file__).parents[2]
LIMIT = 100.0  # seconds; a rank that outlives its parent must notice the loss first, on a machine that may be very busy

SCRIPT = """
    import pathlib, sys, time
    pathlib.Path(sys.argv[1], f"imports-{time.time_ns()}").touch()
    import lightning as L
    from pipepart import PipelineStrategy
    from support.lightning_modules import Module, loader

    class Slow(Module):
        def setup(self, stage):
            pathlib.Path(sys.argv[1], f"sets-up-{self.global_rank}").touch()
            if self.global_rank == 0 and sys.argv[2:] == ["slowly"]:
                time.sleep(300)

        def on_train_batch_start(self, batch, batch_idx):
            pathlib.Path(sys.argv[1], f"trains-{self.global_rank}").touch()
            time.sleep(0.05)

    if __name__ == "__main__":
        trainer = L.Trainer(strategy=PipelineStrategy(stages=2, microbatches=2, timeout=300), devices=2, accelerator="cpu",
            max_epochs=10_000, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False)
        trainer.fit(Slow("mlp"), loader("mlp", 64, 4))
"""


def _with_mark(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _start(words: list[str], folder: Path, mark: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=job_environment(PYTHONPATH=path, PIPEPART_TEST_TOKEN=mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _ranks_of_train(folder: Path, mark: str) -> bool:
    return any(b"multiprocessing" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _with_mark(mark))


def _trains(folder: Path, mark: str) -> bool:
    return all((folder / f"trains-{rank}").exists() for rank in range(2))


def _waits_in_set_up(folder: Path, mark: str) -> bool:
    """Whether rank 1 waits for rank 0, which it has met before."""
    if not all((folder / f"sets-up-{rank}").exists() for rank in range(2)):
        return False
    time.sleep(3)
    return True


TRAIN = ["-m", "pipepart.cli", "train", "recipe=mlp", "logger=csv", "trainer.max_steps=100000", "callbacks=none"]
MOMENTS = {
    "train, ranks start": (TRAIN, _ranks_of_train),
    "train, ranks train": (TRAIN, lambda folder, mark: any(folder.glob("outputs/*/*/metrics/*.csv"))),
    "script, ranks start": (["train.py", "."], lambda folder, mark: len(_with_mark(mark)) > 1),
    "script, ranks import": (["train.py", "."], lambda folder, mark: len(list(folder.glob("imports-*"))) > 1),
    "script, ranks set up": (["train.py", ".", "slowly"], _waits_in_set_up),
    "script, ranks train": (["train.py", "."], _trains),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("moment", MOMENTS)
def test_ranks_end_with_their_parent(tmp_path: Path, moment: str) -> None:
    words, reached = MOMENTS[moment]
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    mark = f"pipepart-test-{uuid.uuid4().hex}"
    parent = _start(words, tmp_path, mark)
    try:
        deadline = time.monotonic() + 240
        while not reached(tmp_path, mark):
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert len(_with_mark(mark)) > 1
        parent.kill()
        parent.wait()
        begun = time.monotonic()
        while left := _with_mark(mark):
            assert time.monotonic() - begun < LIMIT, f"processes {left} were left behind"
            time.sleep(0.05)
    finally:
        for pid in _with_mark(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="by the kernel of Linux")
def test_a_process_whose_parent_has_ended_before_does_not_start(tmp_path: Path) -> None:
    command = tied([sys.executable, "-c", "open('started', 'w').close()"])
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 0
    (tmp_path / "started").unlink()
    command[command.index(str(os.getpid()))] = str(os.getppid())
    subprocess.run(command, cwd=tmp_path, timeout=60)
    assert not (tmp_path / "started").exists()
