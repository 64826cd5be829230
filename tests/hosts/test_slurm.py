"""Jobs on a real cluster of SLURM with two nodes (`tools/slurm`): each way of launching, a requeue, and a time limit."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.environment import job_environment

from tools.slurm.cluster import Cluster, started_cluster, why_no_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("slurm")]
PATIENCE = 360  # seconds; a busy machine takes long to import
PROGRAM = Path(__file__).parent / "slurm_program.py"
SHORT = ["recipe=mlp", "logger=none", "trainer.max_steps=4", "trainer.limit_val_batches=1"]
TRAIN = [sys.executable, "-m", "pipepart.cli", "train"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    with started_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def _ended(cluster: Cluster, words: list[str], folder: Path) -> str:
    program = cluster.start(words, folder, job_environment())
    said: str = program.communicate(timeout=PATIENCE)[0]
    assert program.returncode == 0, said + cluster.logs()
    return said


def _wait(what: Callable[[], bool], cluster: Cluster, about: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, about() + cluster.logs()
        time.sleep(0.2)


def test_srun_starts_the_ranks_of_a_recipe(cluster: Cluster, tmp_path: Path) -> None:
    """The nodes meet at the name of the first one, which is an address of loopback on that node itself."""
    words = ["srun", "--nodes", "2", "--ntasks-per-node", "2", *TRAIN, *SHORT, f"output={tmp_path / 'run'}"]
    said = _ended(cluster, words, tmp_path)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["stages"] == 4
    assert "node 0     replica 0 stage 0, replica 0 stage 1" in said
    assert "node 1     replica 0 stage 2, replica 0 stage 3" in said


def test_the_launcher_submits_a_run_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = [*TRAIN, "-m", *SHORT, "launcher=slurm", "launcher.nodes=2", "devices=1", "hydra.launcher.timeout_min=30"]
    _ended(cluster, [*words, f"hydra.sweep.dir={tmp_path / 'sweep'}"], tmp_path)
    with open(tmp_path / "sweep" / "summary.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["outcome"] == "ok"
    result = tmp_path / "sweep" / "0" / "result.json"
    assert json.loads(result.read_text())["stages"] == 2


def _submit(cluster: Cluster, folder: Path, steps: int, *options: str) -> str:
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\nexec srun {sys.executable} {PROGRAM} {folder} {steps}\n")
    words = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={folder / 'job.log'}", *options]
    return cluster.run(*words, str(script), folder=folder, environment=job_environment()).strip()


def _log(folder: Path) -> str:
    return (folder / "job.log").read_text() if (folder / "job.log").exists() else "no output\n"


def _steps(folder: Path, rank: int) -> list[tuple[int, int]]:
    """The starts of the job and the steps that a rank has done."""
    path = folder / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(start), int(step)) for start, step in map(str.split, lines)]


def test_a_script_is_requeued_and_goes_on_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    """Lightning's own way: SIGUSR1 saves a checkpoint and puts the job back into the queue, and the next start loads it."""
    job = _submit(cluster, tmp_path, 60, "--requeue", "--open-mode=append")
    _wait(lambda: len(_steps(tmp_path, 0)) >= 3, cluster, lambda: _log(tmp_path))
    cluster.run("scancel", "--signal=USR1", job)
    _wait(lambda: cluster.state(job) == "PENDING", cluster, lambda: _log(tmp_path))
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # SLURM waits for two minutes otherwise
    _wait(lambda: cluster.state(job) in ("COMPLETED", "FAILED", "CANCELLED"), cluster, lambda: _log(tmp_path))
    assert cluster.state(job) == "COMPLETED", _log(tmp_path)
    for rank in range(2):
        before, after = ([step for start, step in _steps(tmp_path, rank) if start == number] for number in range(2))
        assert before == list(range(1, len(before) + 1))
        # A job trains on until SLURM ends it, here as in plain Lightning: these steps are done again.
        assert after == list(range(after[0], 61)) and 3 < after[0] <= before[-1] + 1, "no step is lost"
    sys.path.insert(0, str(PROGRAM.parent))
    from slurm_program import fit

    (tmp_path / "plain").mkdir()
    fit(tmp_path / "plain", 60, 0.0, devices=1)
    found, expected = (
        torch.load(tmp_path / name / "end.ckpt", weights_only=False)["state_dict"] for name in (".", "plain")
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_job_that_reaches_its_time_limit_ends_on_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, 1_000_000, "--time=1", "--no-requeue")
    _wait(lambda: cluster.state(job) not in ("PENDING", "CONFIGURING", "RUNNING"), cluster, lambda: _log(tmp_path))
    assert cluster.state(job) in ("TIMEOUT", "COMPLETING"), _log(tmp_path)
    _wait(lambda: not cluster.run("squeue", "-h"), cluster, lambda: _log(tmp_path))
    for host in cluster.hosts:
        assert str(PROGRAM) not in host.run("ps", "-eo", "args"), "a process is left"
