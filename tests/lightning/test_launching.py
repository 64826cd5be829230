"""Real programs: a script that Lightning starts, the same under torchrun, and what happens at SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.environment import job_environment

from pipepart.runtime.addresses import free_port

SCRIPT = """
import json, os, sys, time
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
import pipepart

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)), torch.nn.Linear(16, 1))
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if "--slowly" in sys.argv:
            time.sleep(0.05)
            with open(f"{folder}/new-{self.global_rank}", "w") as file:
                file.write(f"{self.global_step} {os.getpid()}")
            os.replace(f"{folder}/new-{self.global_rank}", f"{folder}/step-{self.global_rank}")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

folder = sys.argv[1]
if __name__ == "__main__":
    L.seed_everything(5, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(40, 16)), batch_size=8, shuffle=True, num_workers=1)
    slowly = "--slowly" in sys.argv
    shape = {"devices": 1, "num_nodes": 2} if "--nodes" in sys.argv else {"devices": 2}
    # By name, all is left to the plan; with micro-batches given, two runs can be compared to the last bit.
    strategy = "pipepart" if slowly or "--nodes" in sys.argv else pipepart.PipelineStrategy(microbatches=4)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=500 if slowly else 2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}")], **shape,
    )
    try:
        trainer.fit(Net(), data)
    finally:
        end = [os.getpid(), trainer.global_step, trainer.received_sigterm]
        open(f"{folder}/pid-{trainer.global_rank}", "w").write(json.dumps(end))
    torch.save(float(trainer.callback_metrics["loss"]), f"{folder}/loss-{trainer.global_rank}")
"""


def _start(
    folder: Path, *more: str, launcher: tuple[str, ...] = (), start_new_session: bool = False, **variables: str
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script), str(folder), *more]
    return subprocess.Popen(
        command,
        env=job_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=start_new_session,
    )


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_script_and_torchrun_give_the_same(tmp_path) -> None:
    """`python script.py` starts the other process itself; `torchrun` has started both. With dataloader workers."""
    elastic = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    launchers: dict[str, tuple[str, ...]] = {"plain": (), "torchrun": elastic}
    programs = [_start(tmp_path / name, launcher=launcher) for name, launcher in launchers.items()]
    for program in programs:
        text, _ = program.communicate(timeout=400)
        assert program.returncode == 0, text
        assert "1 replica(s) x 2 stage(s)" in text, text
        assert "predicted" in text, text
        assert text.count("pipepart: measured") == 1, "rank 0 alone holds the prediction against the run"
    losses = [torch.load(tmp_path / name / f"loss-{rank}") for name in ("plain", "torchrun") for rank in range(2)]
    assert len(set(losses)) == 1, losses
    torch.load(tmp_path / "plain" / "epoch=1.ckpt", weights_only=True)


@pytest.mark.slow
def test_two_nodes_under_slurm(tmp_path) -> None:
    """The variables that srun sets, for two nodes with one process each (here on one host)."""
    port = str(free_port())
    job = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1", "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    programs = [_start(tmp_path, "--nodes", **job, SLURM_PROCID=str(i), SLURM_NODEID=str(i)) for i in range(2)]
    texts = [program.communicate(timeout=400)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], texts
    assert "node 0     replica 0 stage 0\nnode 1     replica 0 stage 1" in texts[0], texts[0]
    assert torch.load(tmp_path / "loss-0") == torch.load(tmp_path / "loss-1")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Path, subprocess.Popen[str]]]]:
    """Two runs that go on until they are told to stop, started at the same time: most of that is importing."""
    folders = [tmp_path_factory.mktemp(f"told-{rank}") for rank in range(2)]
    found = [(folder, _start(folder, "--slowly", start_new_session=True)) for folder in folders]
    yield found
    for _, program in found:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_finishes_the_step_saves_and_ends_all_ranks(endless, told: int) -> None:
    """The main process passes it on to the others; a scheduler may as well tell one of the others only."""
    tmp_path, program = endless[told]
    note = tmp_path / f"step-{told}"
    deadline = time.monotonic() + 300
    while not note.exists() or int(note.read_text().split()[0]) < 3:
        assert time.monotonic() < deadline
        assert program.poll() is None, program.communicate(timeout=10)[0]
        time.sleep(0.05)
    os.kill(int(note.read_text().split()[1]), signal.SIGTERM)
    text, _ = program.communicate(timeout=240)
    ends = [json.loads((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    assert ends[0][1:] == ends[1][1:], "both ranks stopped after the same step"
    assert ends[0][2] is True
    deadline = time.monotonic() + 90
    while any(_runs(pid) for pid, *_ in ends):
        assert time.monotonic() < deadline, "a rank was left behind"
        time.sleep(0.1)
    saved = list(tmp_path.glob("sigterm-*.ckpt"))
    assert len(saved) == 1, text
    content = torch.load(saved[0], weights_only=True)
    assert content["global_step"] == ends[0][1]
    assert f"stopped by SIGTERM after step {content['global_step']}" in text
