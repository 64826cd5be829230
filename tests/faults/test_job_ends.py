"""A rank that raises or dies brings the whole job down at once, with the first cause; nothing is left running."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.environment import job_environment

ROOT = Path(__file__).parents[2]
LIMIT = 390.0  # for the whole job on a loaded machine; the time from the failure to the end is checked apart

TRAINER = """
    import os, sys, time
    import lightning as L
    import torch
    from pipepart import PipelineStrategy
    from support.lightning_modules import Module, loader

    class Failing(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2 and self.trainer.global_rank == {rank}:
                print("FAILING AT", time.time(), flush=True)
                {failure}

    if __name__ == "__main__":
        trainer = L.Trainer(strategy=PipelineStrategy(stages=2, microbatches=2, timeout=300), devices=2, accelerator="cpu",
            max_steps=10, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Failing("mlp"), loader("mlp", 64, 4))
        print("SHOULD NOT BE REACHED")
"""

PLAIN = """
    import os, sys, time
    import torch
    from pipepart import Pipeline
    from support.models import build

    model = build("mlp")
    pipe = Pipeline(model, model.batch(8), stages=2, microbatches=4, timeout=300)
    for index in range(10):
        if index == 2 and int(os.environ["RANK"]) == {rank}:
            print("FAILING AT", time.time(), flush=True)
            {failure}
        pipe.step(*model.batch(8))
    print("SHOULD NOT BE REACHED")
"""

RAISE = 'raise ValueError("the cause of it all")'
CAUSE = "ValueError: the cause of it all"
KILL = "os.kill(os.getpid(), 9)"


def _run(command: list[str]) -> tuple[subprocess.CompletedProcess[str], float, list[int]]:
    """Run a job; its result, the wall time at its end, and the processes that it left behind."""
    token = f"pipepart-test-{uuid.uuid4().hex}"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = job_environment(PYTHONPATH=path, PIPEPART_TEST_TOKEN=token)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
    return result, time.time(), _with_token(token)


def _with_token(token: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if token.encode() in (folder / "environ").read_bytes() and (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def _check(result: subprocess.CompletedProcess[str], ended: float, left: list[int], cause: str | None) -> None:
    output = result.stdout + result.stderr
    assert result.returncode != 0, output
    assert "SHOULD NOT BE REACHED" not in output
    failed = float(output.split("FAILING AT")[1].split()[0])
    assert not left, f"processes {left} were left behind"
    assert ended - failed < 120, f"the job ended {ended - failed:.0f} s after the failure\n{output}"
    if cause is not None:
        assert cause in output, output


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
JOBS: dict[str, tuple[str, list[str], int, str, str | None]] = {
    "script raises": (TRAINER, [], 1, RAISE, CAUSE),
    "script killed": (TRAINER, [], 0, KILL, None),
    "torchrun raises": (PLAIN, TORCHRUN, 0, RAISE, CAUSE),
    "torchrun killed": (PLAIN, TORCHRUN, 1, KILL, None),
}
"""Name -> program, launcher, the rank that fails, how, and what must be said."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """All of them, two at a time: most of what they do is to import libraries, one process after the other."""
    with ThreadPoolExecutor(2) as threads:
        found = {}
        for name, (program, launcher, rank, failure, _) in JOBS.items():
            script = tmp_path_factory.mktemp("job") / "train.py"
            script.write_text(textwrap.dedent(program).format(rank=rank, failure=failure))
            found[name] = threads.submit(_run, [sys.executable, *launcher, str(script)])
        yield found
        threads.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_all_processes_end_with_the_cause(jobs: dict[str, Future[Any]], name: str) -> None:
    """A user's own script, started by Lightning's launcher, and a plain loop under torchrun."""
    _check(*jobs[name].result(), JOBS[name][-1])
