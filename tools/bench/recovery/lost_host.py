"""One run on two hosts of which the second one ends in the middle."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Recovery", "recovered"]

_ROOT = Path(__file__).parents[3]
_STEPS = 1_000_000
_LONGEST = 900.0  # seconds for each part of a run: the machine may be busy
_CALLBACK = '''
import pathlib, time
import lightning as L


class Steps(L.Callback):
    """Writes the number and the time of each optimizer step."""

    def __init__(self, path: str) -> None:
        self.file, self.last = open(path, "a", buffering=1), -1

    def on_train_start(self, trainer, *_):
        self.last = trainer.global_step

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero and trainer.global_step != self.last:
            self.last = trainer.global_step
            self.file.write(f"{self.last} {time.monotonic()} {trainer.world_size}\\n")
'''


@dataclass(frozen=True)
class Recovery:
    """The times of one recovery, in seconds from the end of the host."""

    source: str
    noticed: float
    """Until the other host knows."""
    total: float
    """Until the first new step is done."""
    lost_at: int
    """The last step before the end."""
    went_on_after: int

    @property
    def repeated(self) -> int:
        return self.lost_at - self.went_on_after


def recovered(folder: Path, recipe: str, source: str, every: int) -> Recovery:
    """Train on two hosts, end one after a few states were kept, and return when and where the other one goes on."""
    sys.path.insert(0, str(_ROOT / "tests"))
    from support.environment import job_environment
    from support.hosts import made_hosts, why_no_hosts

    if (reason := why_no_hosts()) is not None:
        raise SystemExit(f"hosts cannot be made here: {reason}")
    (folder / "steps_written.py").write_text(_CALLBACK)
    steps = folder / "steps"
    words = [
        "-m",
        "pipepart.cli",
        "train",
        f"recipe={recipe}",
        "logger=none",
        "strategy.stages=2",
        "devices=2",
        "launcher=nodes",
    ]
    words += ["launcher.nodes=2", "launcher.failures=1", "launcher.min_nodes=1", f"trainer.max_steps={_STEPS}"]
    words += [
        "allow=[steps_written]",
        "+callbacks.steps._target_=steps_written.Steps",
        f"+callbacks.steps.path={steps}",
    ]
    words += [f"output={folder / 'run'}"]
    if source == "memory":
        words += ["launcher.spare_state=neighbour", f"launcher.spare_every={every}", "trainer.val_check_interval=null"]
        words += ["trainer.limit_val_batches=0"]
    else:
        words += [f"trainer.val_check_interval={every}", "trainer.limit_val_batches=1"]
    environment = job_environment(PYTHONPATH=os.pathsep.join([str(folder), str(_ROOT)]))
    with made_hosts(2) as hosts, open(folder / "said", "w") as said:
        words += [f"launcher.address={hosts[0].address}:29401"]
        programs = [host.start([sys.executable, *words], folder, environment, said) for host in hosts]
        _until(lambda: len(_read(steps)) > 2.5 * every, programs[0], folder)
        before = time.monotonic()
        hosts[1].end()
        _until(lambda: "restart 1 of 1" in (folder / "said").read_text(), programs[0], folder)
        noticed = time.monotonic()
        _until(lambda: any(world == 2 for _, _, world in _read(steps)), programs[0], folder)
        programs[0].send_signal(signal.SIGTERM)
        done = [step for step, when, world in _read(steps) if world == 4]
        first, when, _ = next(line for line in _read(steps) if line[2] == 2)
    return Recovery(source, noticed - before, when - before, done[-1], first - 1)


def _read(steps: Path) -> list[tuple[int, float, int]]:
    lines = steps.read_text().splitlines(keepends=True) if steps.exists() else []
    fields = [line.split() for line in lines if line.endswith("\n")]
    return [(int(step), float(when), int(world)) for step, when, world in fields]


def _until(done, program, folder: Path) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + _LONGEST
    while not done():
        if program.poll() is not None or time.monotonic() > deadline:
            text = re.sub(r"\n{2,}", "\n", (folder / "said").read_text())
            raise SystemExit(f"the run has ended, or takes longer than {_LONGEST:.0f} s:\n{text[-4000:]}")
        time.sleep(0.05)
