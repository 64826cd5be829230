"""Another user of the host attacks running jobs: they listen on loopback only, serve no stranger, and go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from support.environment import job_environment
from support.stranger import attack, listeners, only_root, stores

ROOT = Path(__file__).parents[2]

SCRIPT = """
    import json, os, pathlib, sys, time
    import lightning as L
    from pipepart import PipelineStrategy
    from support.lightning_modules import Module, loader

    folder = pathlib.Path(sys.argv[1])

    class Waiting(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                (folder / f"trains-{self.trainer.global_rank}").touch()
                until = time.monotonic() + 300
                while not (folder / "go on").exists() and time.monotonic() < until:
                    time.sleep(0.05)

    if __name__ == "__main__":
        L.seed_everything(1, verbose=False)
        trainer = L.Trainer(strategy=PipelineStrategy(stages=2, microbatches=2, timeout=300, transport=sys.argv[2]),
            devices=2, accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Waiting("mlp"), loader("mlp", 64, 4))
        if trainer.global_rank == 0:
            (folder / "loss").write_text(json.dumps(float(trainer.callback_metrics["train_loss"])))
"""


def test_the_ping_finds_a_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert stores([store.port]) == {store.port}


@pytest.fixture(params=["script", "torchrun"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A job with the marks of its processes: of all, and of its ranks (the store of torchrun is torchrun's own)."""
    script, mark = tmp_path / "train.py", f"pipepart-test-{uuid.uuid4().hex}"
    script.write_text(textwrap.dedent(SCRIPT))
    launcher, transport, ranks = {
        "script": ([], "auto", ""),
        "torchrun": (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            "group",
            "LOCAL_WORLD_SIZE=",
        ),
    }[request.param]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, *launcher, str(script), str(tmp_path), transport],
        env=job_environment(PYTHONPATH=path, PIPEPART_TEST_TOKEN=mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    yield process, mark, ranks
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
@only_root
def test_a_job_goes_on_under_attack(job: tuple[subprocess.Popen[str], str, str], tmp_path: Path) -> None:
    process, mark, of_ranks = job
    deadline = time.monotonic() + 240
    while not all((tmp_path / f"trains-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        attack([], listeners(mark)[1])  # the sockets of stages are there only while they connect
        time.sleep(0.1)
    ports, names = listeners(mark, of_ranks)
    assert {(family, address) for family, address, _ in ports} == {("tcp", "0100007F")}, ports  # gloo, on loopback
    assert not stores(port for _, _, port in ports)
    assert not names
    attack(ports, names, seconds=1)
    (tmp_path / "go on").touch()
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert json.loads((tmp_path / "loss").read_text()) > 0


SIEGE = """
    import os, pathlib, socket, traceback
    from contextlib import suppress
    from datetime import timedelta

    import torch.distributed

    from pipepart.runtime.mesh import Groups, Mesh
    from pipepart.runtime.rendezvous import job_folder, join_job
    from support.stranger import NOBODY

    def rank(number):
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        try:
            join_job(timedelta(seconds=300))
            for _ in range(10):
                groups = Groups.create(Mesh(1, 2), timedelta(seconds=300))
                torch.distributed.all_reduce(torch.ones(1), group=groups.pipeline)
            os.write(1, b"connected\\n")
        except Exception as error:
            os.write(1, f"{type(error).__name__}: {error}\\n".encode())

    def stranger():
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        kept, seen = [], set()
        while True:
            for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[1] not in seen:
                    seen.add(fields[1])
                    for number in range(3):
                        kept.append(socket.socket())
                        with suppress(OSError):
                            kept[-1].connect(("127.0.0.1", int(fields[1].split(":")[1], 16)))
                            kept[-1].send(number.to_bytes(8, "little"))

    with job_folder():
        children = []
        for work in (stranger, lambda: rank(0), lambda: rank(1)):
            children.append(os.fork())
            if not children[-1]:
                try:
                    work()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
        os.waitid(os.P_ALL, 0, os.WEXITED)  # the first rank that ends, as a launcher waits for it
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, 9)
"""


@pytest.mark.slow
@only_root
def test_a_stranger_does_not_take_the_place_of_a_rank(tmp_path: Path) -> None:
    """In a network of its own, in which the stranger tries every port: gloo takes the first connection with a number."""
    script = tmp_path / "siege.py"
    script.write_text(textwrap.dedent(SIEGE))
    inside = f"ip link set lo up && exec {sys.executable} -W always {script}"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", inside],
        env=job_environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "PipelineError: while the ranks of this job connected, another user of this host connected" in done.stdout
    assert "Timed out" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@only_root
def test_the_command_under_attack(tmp_path: Path) -> None:
    """`pipepart train` on one host listens on loopback only. It goes on, or ends at once with the name of the attacker."""
    mark = f"pipepart-test-{uuid.uuid4().hex}"
    words = ["train", "recipe=mlp", "logger=csv", "trainer.max_steps=400", "trainer.limit_val_batches=1"]
    with open(tmp_path / "said.txt", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipepart.cli", *words, f"output={tmp_path / 'run'}"],
            env=job_environment(PYTHONPATH=str(ROOT), PIPEPART_TEST_TOKEN=mark, WANDB_MODE="offline"),
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            start_new_session=True,
        )
        seen = set()
        try:
            deadline = time.monotonic() + 400
            while process.poll() is None:
                assert time.monotonic() < deadline
                ports, names = listeners(mark)
                fresh = [port for port in ports if port not in seen]
                assert not stores(port for _, _, port in fresh)
                attack(fresh, names)
                seen.update(fresh)
                time.sleep(0.3)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    text = (tmp_path / "said.txt").read_text()
    assert {(family, address) for family, address, _ in seen} == {("tcp", "0100007F")}, (seen, text)
    if process.returncode:
        assert "another user of this host connected" in text
    else:
        assert list((tmp_path / "run").glob("checkpoints/*.ckpt"))
