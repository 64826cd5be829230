"""The callback that keeps the state of a run in the memory of its hosts (`launcher.spare_state=neighbour`)."""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from torch.optim import LBFGS

from pipepart.errors import ConfigError
from pipepart.lightning.spare_parts import own_checkpoint, part_of, send_to_neighbours, write_part, written_part
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import exchange_objects, gather_objects
from pipepart.spare_files import name_of, part_name

__all__ = ["SpareState"]

_NOT_DIVIDED = ("WeightAveraging", "StochasticWeightAveraging")


class SpareState(Checkpoint):
    """Keeps the state of a run in memory after each `every` optimizer steps. All ranks must have it."""

    def __init__(self, folder: str | os.PathLike[str], every: int) -> None:
        """`folder` is the folder of this host (`spare_folder`)."""
        self.folder, self.every = Path(folder), every
        self.step = -1
        """The step of the state that was kept last, or with which the run has begun."""
        self._start = ""
        self._hosts: list[int] = []
        self._warned = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _check(trainer)
        strategy: Any = trainer.strategy
        self._start = strategy.broadcast(secrets.token_hex(4))
        groups = strategy._ranks.groups
        self._hosts = [0] if groups is None else gather_objects(int(os.environ.get("GROUP_RANK", "0")), groups)
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0 and trainer.global_step != self.step:
            self._keep(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        """Write the part of this rank and those of its neighbours; then remove the state before."""
        strategy: Any = trainer.strategy
        runtime, groups, mesh = strategy._whole.runtime, strategy._ranks.groups, strategy.mesh
        rank = 0 if groups is None else groups.rank
        divided = runtime is not None and runtime.parameters.divides_updates
        writers = [other for other in range(mesh.world_size) if divided or mesh.replica_of(other) == 0]
        names = {writer: part_name(number, len(writers)) for number, writer in enumerate(writers)}
        checkpoint = own_checkpoint(trainer)  # all ranks take part
        data = b""
        if rank in writers:
            data = written_part(part_of(checkpoint, rank == 0, mesh.replica_of(rank) == 0))
        parts, faults = {rank: data} if data else {}, list[str]()
        state = self.folder / name_of(trainer.global_step, self._start)
        if groups is not None:
            with guarded(groups):
                parts.update(send_to_neighbours(data, exchange_objects(len(data), groups), self._hosts, groups))
        try:
            state.mkdir(mode=0o700, exist_ok=True)
            for writer, content in parts.items():
                write_part(state / names[writer], content)
        except OSError as error:
            faults = [f"rank {rank}: {error}"]
        if groups is not None:
            with guarded(groups):
                faults = [fault for found in exchange_objects(faults, groups) for fault in found]
        if not faults:
            self.step = trainer.global_step
        elif trainer.is_global_zero and not self._warned:
            warnings.warn(
                f"the state of step {trainer.global_step} could not be kept in memory ({faults[0]}); the one before "
                "stays, and the next ones are tried",
                stacklevel=2,
            )
            self._warned = True
        for path in self.folder.glob("step-*"):  # other ranks of this host do the same
            if (path.name == state.name) is bool(faults):
                shutil.rmtree(path, ignore_errors=True)


def _check(trainer: L.Trainer) -> None:
    """Refuse what cannot be kept in parts."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    kinds = [kind.__name__ for callback in callbacks for kind in type(callback).__mro__]
    for name in _NOT_DIVIDED:
        if name in kinds:
            raise ConfigError(
                f"launcher.spare_state=neighbour keeps the weights in parts, and {name} writes averages in their place: use "
                "pipepart.WeightEMA, or launcher.spare_state=null"
            )
    strategy: Any = trainer.strategy
    runtime = strategy._whole.runtime
    if runtime is not None and runtime.parameters.borrowed is not None:
        raise ConfigError(
            "launcher.spare_state=neighbour is not supported with sync='fsdp': use sync='sharded', or launcher.spare_state=null"
        )
    loose = runtime.parameters.loose if runtime is not None else None
    if loose is not None:
        raise ConfigError(
            f"launcher.spare_state=neighbour is not supported with sync='{loose.mode}', where each replica has "
            "parameters of its own: the memory would hold those of one of them. Use sync='mean' or 'sharded', or "
            "launcher.spare_state=null"
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise ConfigError(
            "launcher.spare_state=neighbour is not for LBFGS, whose state is one vector over all parameters: use another "
            "optimizer, or launcher.spare_state=null"
        )
