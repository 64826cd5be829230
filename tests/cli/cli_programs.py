"""Programs for the tests of the command line: real processes, and a recipe of a user that fails when told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.environment import short_imports

__all__ = ["PATIENCE", "SHORT", "end", "gone", "path_with", "start", "train_trouble", "trouble_folder"]

PATIENCE = 360  # seconds; a busy machine takes long to import
SHORT = ["logger=csv", "trainer.max_steps=6", "trainer.limit_val_batches=1", "trainer.val_check_interval=3"]

RECIPE = """
# @package _global_
defaults:
  - override /model: mlp
  - override /data: spirals
  - override /optimizer: adam
name: trouble
model:
  _target_: trouble.Trouble
"""
MODULE = """
import os, pathlib, time
from recipes.mlp import MLPModule

class Trouble(MLPModule):
    def on_train_start(self):
        pathlib.Path(f"pid{self.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_start(self, batch, batch_idx):
        when = ("raise", self.trainer.strategy.plan.schedule)
        if batch_idx == 3 and self.global_rank == 1 and os.environ["TROUBLE"] in when:
            raise ValueError("boom on purpose")
        if os.environ["TROUBLE"] == "none":
            time.sleep(0.05)  # it goes on until it is ended, beside other tests
"""


def start(words: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipepart.cli", *words],
        cwd=folder,
        env=short_imports({**os.environ, **environment}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_interrupts,
    )


def _hear_interrupts() -> None:
    """A program in the background of a script inherits that it ignores Ctrl-C; these are as in a terminal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def left(session: int) -> list[str]:
    """Processes of a session that are still there (zombies do not count)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        state, _, _, owner = rest.split()[:4]
        if int(owner) == session and state != "Z":
            found.append(name)
    return found


def gone(session: int) -> bool:
    deadline = time.monotonic() + 90
    while left(session) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not left(session)


def path_with(folder: Path) -> str:
    """PYTHONPATH with a folder in front of what it has."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def trouble_folder(folder: Path) -> Path:
    """A folder with a recipe of a user that fails when it is told to."""
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "conf" / "recipe" / "trouble.yaml").write_text(RECIPE)
    (folder / "trouble.py").write_text(MODULE)
    return folder


def train_trouble(folder: Path, what: str, steps: int) -> subprocess.Popen[str]:
    words = [
        "train",
        "--config-dir",
        "conf",
        "recipe=trouble",
        "allow=[trouble]",
        "logger=none",
        f"trainer.max_steps={steps}",
    ]
    return start(words, folder, TROUBLE=what, PYTHONPATH=path_with(folder))
