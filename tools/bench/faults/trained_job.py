"""One rank of a small training run with a Trainer that saves after each step, and fails at a chosen place in a chosen way."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tools.bench.faults.job import Fault

__all__ = ["CHECKPOINTS", "Trained", "train_rank"]

CHECKPOINTS = "checkpoints"
_STEPS = 6
_armed: list[Trained] = []


@dataclass(frozen=True)
class Trained(Fault):
    """A fault of a run. `where` may also be ``set-up``, ``update``, ``save`` or ``validation``."""

    stages: int = 2
    sharded: bool = False
    step: int = 2
    """In which the fault comes."""


def train_rank(rank: int, folder: str, fault: Trained) -> None:
    """Runs until the fault; what this rank says at its end goes to a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(fault.ranks), LOCAL_RANK=str(rank), GROUP_RANK="0")
    os.environ.update(
        LOCAL_WORLD_SIZE=str(fault.ranks), TORCHELASTIC_RUN_ID="faults", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    try:
        store = dist.FileStore(os.path.join(folder, "store"), fault.ranks)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=fault.ranks, timeout=limit)
        _train(rank, folder, fault)
        said = "finished"
    except BaseException:
        said = traceback.format_exc()
    with open(os.path.join(folder, f"said-{rank}"), "w") as file:
        file.write(said)
    os._exit(1)  # as the launchers end a rank: no goodbye to the others


def _train(rank: int, folder: str, fault: Trained) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch import nn

    from pipepart import PipelineStrategy

    note = os.path.join(folder, "struck")

    class Trip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if _armed and fault.where == "forward":
                fault.strike(note)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            if _armed and fault.where == "backward":
                fault.strike(note)
            return gradient

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Trip.apply(self.linear(x))

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Layer() for _ in range(fault.stages)))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layers(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("loss", self.layers(batch).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Arms(Callback):
        """Lets the fault come, and notes the step of each finished save."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if fault.where == "set-up" and rank == fault.rank:
                fault.strike(note)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if rank != fault.rank or batch_idx != fault.step:
                return
            _armed.append(fault)
            if fault.where == "communication":
                _trip_sends(trainer, note, fault)
            elif fault.where == "save":
                _trip_writes(note, fault)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if _armed and fault.where == "update":
                fault.strike(note)

        def on_validation_batch_start(self, *args: Any) -> None:
            if _armed and fault.where == "validation":
                fault.strike(note)

    class Noted(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            if trainer.is_global_zero:
                Path(folder, "saved").write_text(str(trainer.global_step))

    torch.manual_seed(0)
    batches = torch.utils.data.DataLoader(torch.randn(8 * _STEPS * 2, 32), batch_size=8)
    saves = Noted(
        os.path.join(folder, CHECKPOINTS), "kept", every_n_train_steps=1, save_top_k=1, save_last=True,
        enable_version_counter=False,
    )  # fmt: skip
    cuts = [f"layers.{index}" for index in range(1, fault.stages)]
    strategy = PipelineStrategy(
        stages=fault.stages, microbatches=4, schedule="1f1b", slack=0, split_at=cuts, transport=fault.transport,
        timeout=fault.limit, sharded=fault.sharded,
    )  # fmt: skip
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=fault.ranks, max_steps=_STEPS, val_check_interval=1, limit_val_batches=1,
        callbacks=[Arms(), saves], logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Module(), batches, batches)


def _trip_sends(trainer: Any, note: str, fault: Trained) -> None:
    """The fault comes in the third send of the step."""
    transport = trainer.strategy.runtime._transport
    original, sends = transport.send, []

    def send(tensor: Any, target: int) -> Any:
        sends.append(target)
        if len(sends) == 3:
            fault.strike(note)
        return original(tensor, target)

    transport.send = send


def _trip_writes(note: str, fault: Trained) -> None:
    """The fault comes in the middle of a save: after a file was written, before it has its name."""
    import torch

    from pipepart.lightning import sharded

    place: Any = sharded if fault.sharded else torch
    name = "write_tensors" if fault.sharded else "save"
    original = getattr(place, name)

    def write(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        fault.strike(note)
        return answer

    setattr(place, name, write)
