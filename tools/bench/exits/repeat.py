"""Start tiny training runs again and again, as users do, and hold every one of their processes to a clean end.

A process that trains well and dies while Python shuts down is easily missed: Lightning's launcher does not look at the
exit codes of the processes that it has started. So a run fails here also if any of its processes says on its way that it
aborts, by the C++ runtime or by Python's fault handler, which is on in all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["KINDS", "repeat"]

_ROOT = Path(__file__).resolve().parents[3]
_LIMIT = 600  # seconds for one run; on a machine with ten times the work that it can do, imports alone took 240
_BAD = ("terminate called", "Fatal Python error", "core dumped", "Traceback (most recent call last)")

_MODEL = """
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)), torch.nn.Linear(16, 1))
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("validation", self.net(batch[0]).pow(2).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""
_TRAINER = (
    _MODEL
    + """
import pipepart

if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8, num_workers=1)
    trainer = L.Trainer(strategy=pipepart.PipelineStrategy(stages=2, microbatches=2), accelerator="cpu", devices=2,
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(Net(), data, data)
"""
)
_PLAIN = """
import torch
from pipepart import Pipeline

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)), torch.nn.Linear(16, 1))
    def forward(self, x):
        return self.net(x).pow(2).mean()

pipe = Pipeline(Net(), (torch.randn(8, 16),), stages=2, microbatches=2, split_at=["net.2"])
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
for _ in range(4):
    pipe.step(torch.randn(8, 16))
    optimizer.step()
    optimizer.zero_grad()
"""
_SHORT = ["logger=csv", "trainer.max_steps=4", "trainer.limit_val_batches=1", "trainer.val_check_interval=2"]
KINDS = {
    "trainer": ["train.py"],
    "command": ["-m", "pipepart.cli", "train", "recipe=mlp", *_SHORT],
    "plain": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "plain.py"],
}
"""Kind of run -> the words after `python`: a script with a Trainer, `pipepart train`, a plain loop under torchrun."""


def repeat(count: int, kinds: Sequence[str]) -> bool:
    """Run `count` runs, the kinds in turn; says the rate and shows the first failure. True if none failed."""
    failed: dict[str, int] = dict.fromkeys(kinds, 0)
    done: dict[str, int] = dict.fromkeys(kinds, 0)
    began = time.monotonic()
    for index in range(count):
        kind = kinds[index % len(kinds)]
        with tempfile.TemporaryDirectory(prefix="pipepart-exits-") as folder:
            code, said = _run(KINDS[kind], Path(folder))
        done[kind] += 1
        if code != 0 or any(word in said for word in _BAD):
            failed[kind] += 1
            if sum(failed.values()) == 1:
                print(f"first failure: run {index + 1} ({kind}), exit code {code}\n{said}", flush=True)
        if (index + 1) % 10 == 0 or index + 1 == count:
            told = ", ".join(f"{kind} {failed[kind]} of {done[kind]}" for kind in kinds)
            print(f"{index + 1} runs in {time.monotonic() - began:.0f} s; failed: {told}", flush=True)
    return not any(failed.values())


def _run(words: Sequence[str], folder: Path) -> tuple[int, str]:
    (folder / "train.py").write_text(_TRAINER)
    (folder / "plain.py").write_text(_PLAIN)
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    environment.update(PYTHONPATH=path, PYTHONFAULTHANDLER="1", OMP_NUM_THREADS="1", WANDB_MODE="offline")
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=_LIMIT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # the fault handler says what each thread was doing
        time.sleep(5)
        os.killpg(process.pid, signal.SIGKILL)
        return -1, f"it did not end within {_LIMIT} s\n{process.communicate()[0]}"
    for log in sorted(folder.rglob("std*.log")):  # of the ranks that `pipepart train` does not show
        said += f"\n--- {log.relative_to(folder)}\n{log.read_text(errors='replace')}"
    return process.returncode, said
