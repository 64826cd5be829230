"""Ranks that are forks of the command: where they may be, and that they begin as processes that were started anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import job_environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks ranks")]

PROGRAM = """
import atexit, json, multiprocessing, os, random, signal, sys, tempfile, threading, time
from pathlib import Path
from pipepart.cli.forks import can_fork, run_fresh
from pipepart.cli.libraries import load_libraries

folder = Path(sys.argv[1])
found = {"before the imports": can_fork()}
load_libraries()
found["after the imports"] = can_fork()
import numpy, torch

begun = time.monotonic()
thread = threading.Thread(target=time.sleep, args=(1,))
thread.start()
found["beside a thread"] = can_fork()
thread.join()
while not can_fork() and time.monotonic() < begun + 60:  # the system ends a thread a little later
    time.sleep(0.01)
found["after the thread"] = can_fork()


def rank(number):
    kept = tempfile.TemporaryDirectory(dir=folder)
    atexit.register((folder / f"left-{number}").touch)
    told = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    handlers = [int(signal.getsignal(one)) for one in (signal.SIGTERM, signal.SIGINT)]
    (folder / f"rank-{number}").write_text(json.dumps([told, handlers, torch.get_num_threads(), kept.name]))


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
mine = tempfile.TemporaryDirectory(dir=folder)
atexit.register(lambda: (folder / f"parent-{os.getpid()}").touch())
random.seed(0), numpy.random.seed(0), torch.rand(7)
os.environ["OMP_NUM_THREADS"] = "3"
forks = [multiprocessing.get_context("fork").Process(target=run_fresh, args=(rank, number)) for number in range(2)]
for fork in forks:
    fork.start()
for fork in forks:
    fork.join(60)
found["exit codes"] = [fork.exitcode for fork in forks]
found["my folder"] = os.path.isdir(mine.name)
torch.ones(2_000_000).add_(1).sum()  # starts the threads of torch
torch.set_num_threads(2), torch.ones(2_000_000).add_(1).sum()
found["with threads of torch"] = can_fork()
print(json.dumps(found))
"""


def test_a_fork_begins_as_a_process_that_was_started_anew(tmp_path: Path) -> None:
    variables = job_environment()
    variables.pop("OMP_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "before the imports": False,
        "after the imports": True,
        "beside a thread": False,
        "after the thread": True,
        "exit codes": [0, 0],
        "my folder": True,
        "with threads of torch": False,
    }
    (one, handlers, threads, kept), (two, *_) = (json.loads((tmp_path / f"rank-{n}").read_text()) for n in range(2))
    assert one[0] != two[0] and one[1] != two[1], "the numbers of Python and NumPy differ between processes"
    assert one[2] == two[2], "those of torch are the same without a seed"
    assert handlers == [0, 0] and threads == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert {"left-0", "left-1"} <= names, "functions that a rank has registered are called at its end"
    assert len([name for name in names if name.startswith("parent-")]) == 1, "those of its parent are not"
    assert not os.path.exists(kept)


def test_the_command_forks_its_ranks(tmp_path: Path) -> None:
    """They see what the program has set before: a process that was started anew would not."""
    words = ["train", "recipe=mlp", "logger=none", "trainer.max_steps=2", "devices=2", f"output={tmp_path / 'run'}"]
    seen = f"""
import os, sys
from pipepart.cli.libraries import load_libraries
load_libraries()
from pipepart.cli import fit as room
from pipepart.cli.main import main
before = room.fit
def fit(*args):
    open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").write(str(os.getppid()))
    return before(*args)
room.fit = fit
print(os.getpid(), flush=True)
sys.exit(main({words!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", seen], env=job_environment(), capture_output=True, text=True, timeout=360, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parent = done.stdout.split()[0]
    assert [(tmp_path / rank).read_text() for rank in "01"] == [parent, parent]
