"""Other launchers than our own: torchrun on two machines, the variables of srun, submitit. Real processes on this host."""

from __future__ import annotations

import base64
import csv
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cli_programs import SHORT, end, path_with, start, trouble_folder
from hydra.errors import MissingConfigException
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry

from pipepart.cli.agent import launch_config
from pipepart.cli.config import compose_config, explaining
from pipepart.cli.main import main
from pipepart.cli.meeting_point import meet_agents
from pipepart.cli.processes import _NAMES, already_started, join_started
from pipepart.errors import ConfigError, PipelineError
from pipepart.runtime.addresses import free_port

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of a launcher, and none left behind."""
    for name in (*RANKS, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SUBMITIT_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("nodes", "host"), [("node[03-07,12],other", "node03"), ("alpha,beta", "alpha"), ("gpu-7", "gpu-7"), ("n[2]", "n2")]
)
def test_the_variables_of_srun_lead_to_the_right_rank(fresh: pytest.MonkeyPatch, nodes: str, host: str) -> None:
    assert not already_started()
    job = {"PROCID": 5, "LOCALID": 1, "NTASKS": 8, "NNODES": 2, "NODEID": 1, "JOB_ID": 41_234, "STEP_NODELIST": nodes}
    for name, value in job.items():
        fresh.setenv(f"SLURM_{name}", str(value))
    assert already_started()
    assert join_started() == (4, 2)
    assert [os.environ[name] for name in RANKS] == ["5", "1", "8", "4", "1", "job-41234"]
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (host, "25234")
    assert join_started() == (4, 2)  # now from the variables of torchrun


def test_one_task_starts_its_processes_itself(fresh: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID"):
        fresh.setenv(name, "0")
    fresh.setenv("SLURM_NTASKS", "1")
    assert not already_started()


def test_the_variables_of_submitit_are_those_that_it_sets() -> None:
    local = pytest.importorskip("submitit.local.local").LocalJobEnvironment._env
    order = ("global_rank", "local_rank", "num_tasks", "num_nodes", "node", "job_id")
    assert _NAMES["SUBMITIT_LOCAL_GLOBALID"] == tuple(local[name] for name in order)


@pytest.mark.slow
def test_slurm_gets_one_task_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["launcher=slurm", "launcher.nodes=2", "devices=8", "hydra.launcher.partition=gpu"]
    found = compose_config(words, hydra=True).hydra.launcher
    assert found._target_.endswith("SlurmLauncher")
    assert (found.nodes, found.tasks_per_node, found.cpus_per_task, found.partition) == (2, 8, 1, "gpu")
    assert main(["train", "-m", "launcher=slurm"]) == 2
    assert "give devices=N" in capsys.readouterr().err


def test_a_launcher_that_is_not_installed_names_its_package() -> None:
    """As Hydra raises it without the plugin, whose name means nothing to a user."""
    missing = MissingConfigException("not found", "hydra/launcher/submitit_slurm", ["basic"])
    with (
        pytest.raises(ConfigError, match=r'needs hydra-submitit-launcher: pip install "pipepart\[slurm\]"'),
        explaining(),
    ):
        raise missing


def _both(processes: list[subprocess.Popen[str]]) -> str:
    said = [end(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return said[0]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_srun_starts_ranks_that_find_each_other(tmp_path: Path) -> None:
    """One node with two tasks, as `srun --ntasks 2 pipepart train` starts them."""
    job = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "127.0.0.1"}
    job["MASTER_PORT"] = str(free_port())
    words = ["train", "recipe=mlp", *SHORT]
    said = _both([start(words, tmp_path, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in (0, 1)])
    (run,) = tmp_path.glob("outputs/*/*/result.json")  # one folder, though each has its own clock
    assert json.loads(run.read_text())["stages"] == 2
    assert "report.html" in said
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    """As in the README: `torchrun --nnodes 2 --node-rank N --master-addr HOST` on both (here one host, one rank each)."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    words = ["-m", "pipepart.cli", "train", "recipe=mlp", *SHORT, "output=runs/one"]
    _both(
        [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *where, "--node-rank", node, *words],
                cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )
            for node in ("0", "1")
        ]
    )  # fmt: skip
    result = json.loads((tmp_path / "runs" / "one" / "result.json").read_text())
    assert (result["stages"], result["replicas"]) == (2, 1)
    assert (tmp_path / "runs" / "latest").resolve() == (tmp_path / "runs" / "one").resolve()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_command_on_two_machines(tmp_path: Path) -> None:
    """The same command on both (here one host, one rank each)."""
    where = ["launcher=nodes", "launcher.nodes=2", f"launcher.address=127.0.0.1:{free_port()}", "devices=1"]
    words = ["train", "recipe=mlp", *SHORT, *where]
    said = _both([start([*words, f"output=runs/{node}"], tmp_path, PIPEPART_TOKEN="a secret") for node in (0, 1)])
    assert "1 process on each of 2 machines" in said
    (result,) = tmp_path.glob("runs/*/result.json")
    assert json.loads(result.read_text())["stages"] == 2


def _meet(port: int, wait: int = 60) -> RendezvousInfo:
    launcher = {"nodes": 2, "min_nodes": None, "address": f"127.0.0.1:{port}", "wait": wait}
    config = launch_config({"devices": 1, "launcher": launcher}, Path("logs"), 1)
    parameters = RendezvousParameters(
        config.rdzv_backend, config.rdzv_endpoint, config.run_id, 2, 2, config.local_addr, **config.rdzv_configs
    )
    return rendezvous_handler_registry.create_handler(parameters).next_rendezvous()


def _met(port: int) -> tuple[int, int, str, int]:
    """The number of this agent and of all of them, and where their ranks meet."""
    met = _meet(port)
    main = met.bootstrap_store_info
    return met.rank, met.world_size, main.master_addr, main.master_port


def _met_twice(port: int) -> list[tuple[int, int, str, int]]:
    return [_met(port) for _ in range(2)]


@pytest.mark.slow
def test_agents_meet_again() -> None:
    """As for each run of a sweep, and after a failure."""
    port = free_port()
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        one, other = (task.result(240) for task in [processes.submit(_met_twice, port) for _ in range(2)])
    assert sorted(turn[0] for turn in (one[0], other[0])) == [0, 1]
    assert [turn[:2] for turn in (*one, *other)] == [one[0][:2], one[0][:2], other[0][:2], other[0][:2]]
    assert [turn[2:] for turn in one] == [turn[2:] for turn in other]


def _begins_alone(port: int, begun: str) -> list[tuple[int, int]]:
    one = meet_agents("127.0.0.1", port, 2, 120, least=1, grace=0.0)
    Path(begun).touch()
    deadline = time.monotonic() + 120
    while not one.waiting():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other = meet_agents("127.0.0.1", port, 2, 120, least=1, grace=120.0)
    return [(met.node, met.nodes) for met in (one, other)]


def _comes_late(port: int, begun: str) -> tuple[int, int]:
    deadline = time.monotonic() + 120
    while not Path(begun).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    met = meet_agents("127.0.0.1", port, 2, 120, least=1)
    return met.node, met.nodes


@pytest.mark.slow
def test_a_machine_that_comes_late_says_so_and_joins_the_next_turn(tmp_path: Path) -> None:
    port, begun = free_port(), str(tmp_path / "begun")
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        tasks = [processes.submit(_begins_alone, port, begun), processes.submit(_comes_late, port, begun)]
        first, late = (task.result(300) for task in tasks)
    assert first == [(0, 1), (0, 2)]
    assert late == (1, 2)


class _Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.slow
def test_agents_of_several_machines_unpickle_nothing(tmp_path: Path) -> None:
    """Everyone who reaches the port can write to the store in which they meet."""
    port = free_port()
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:  # one on each machine
        agents = [processes.submit(_met, port)]
        stranger = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        stranger.set("torch.rendezvous.pipepart", base64.b64encode(pickle.dumps(_Runs(tmp_path / "code-ran"))))
        agents.append(processes.submit(_met, port))
        met = [agent.result(240) for agent in agents]
    assert not (tmp_path / "code-ran").exists()
    assert [one[:2] for one in met] == [(0, 2), (1, 2)], "the agent that serves the store is the first one"
    assert met[0][2:] == met[1][2:]
    assert met[0][3] < 32_768, "a port that Linux gives to connections may be taken before the first rank listens on it"


def test_a_machine_that_does_not_come_is_missed() -> None:
    with pytest.raises(
        PipelineError, match=r"2 machines .* have not met at launcher.address=127.0.0.1:\d+ .* 1 of them came"
    ):
        _meet(free_port(), wait=1)


def test_a_port_of_another_program_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with pytest.raises(
            ConfigError, match=r"cannot listen on 127.0.0.1 port \d+.* Another job or program may use the port"
        ):
            _meet(other.getsockname()[1], wait=5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_submitit_runs_every_job_on_its_own_tasks(tmp_path: Path) -> None:
    """What launcher=slurm does, with processes of this host: two jobs of two tasks; one fails, the other one does not."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["train", "-m", "--config-dir", "conf", "recipe=trouble", "allow=[trouble]", "launcher=submitit_local"]
    folder = trouble_folder(tmp_path)
    process = start(
        [*words, "devices=2", *SHORT, "strategy.schedule=gpipe,1f1b"],
        folder,
        TROUBLE="gpipe",
        PYTHONPATH=path_with(folder),
    )
    said = end(process)
    assert process.returncode == 1, said
    rows = list(csv.DictReader(next(folder.glob("outputs/sweeps/*/*/summary.csv")).open()))
    assert [row["strategy.schedule"] for row in rows] == ["gpipe", "1f1b"]
    assert rows[0]["outcome"].startswith("failed: rank 1 failed first"), said
    assert rows[1]["outcome"] == "ok", said
    assert "Traceback" not in said
    logs = {path.name for path in folder.glob("outputs/sweeps/*/*/*/logs/*")}
    assert logs and all("-rank" in name for name in logs), logs  # no task has started processes of its own


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_task_does_not_wait_for_one_that_could_not_start(tmp_path: Path) -> None:
    """A queue ends no task when another one fails. Rank 1 would wait for the store of rank 0 until its time limit."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["train", "-m", "--config-dir", "conf", "recipe=trouble", "allow=[trouble]", "launcher=submitit_local"]
    folder = trouble_folder(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = {"TROUBLE": "no", "PYTHONPATH": path_with(folder), "MASTER_PORT": str(other.getsockname()[1])}
        process = start([*words, "devices=2", "strategy.timeout=3000", *SHORT], folder, **given)
        said = end(process)
    assert process.returncode == 1, said
    (row,) = csv.DictReader(next(folder.glob("outputs/sweeps/*/*/summary.csv")).open())
    assert row["outcome"].startswith("failed: rank 0 failed first"), said
    reasons = {path.name: json.loads(path.read_text()) for path in folder.glob("outputs/sweeps/*/*/*/logs/failure-*")}
    assert "cannot listen on" in reasons["failure-rank0.json"]["text"]
    assert reasons["failure-rank1.json"]["echo"] and "cannot listen on" in reasons["failure-rank1.json"]["text"]
