"""The callback of a run that may lose a replica (`launcher.lost_replica=continue`): it gives states to replicas that join."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from torch.optim import LBFGS

from pipepart.lightning.replica_strategy import ReplicaStrategy, refused
from pipepart.lightning.spare_parts import own_checkpoint, part_of, write_part, written_part
from pipepart.runtime.replica_board import Start
from pipepart.spare_files import name_of, part_name

__all__ = ["ReplicaMember"]


class ReplicaMember(Checkpoint):
    """Gives the state of a replica to one that joins, after the step in which all have agreed on it. All ranks must have it."""

    def __init__(self, strategy: ReplicaStrategy) -> None:
        self._strategy = strategy
        self._given: Start | None = None

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise refused("LBFGS, whose state is one vector over all parameters", "use another optimizer")

    def on_train_batch_start(self, *_: Any) -> None:
        self._strategy.resumes = False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        board = self._strategy.board
        if board is None or board.joining is None or board.joining == self._given:
            return
        self._given = board.joining
        if board.start[0] != board.donor:
            return
        checkpoint = own_checkpoint(trainer)  # all ranks of the replica take part
        # The name is that of the start that joins, on all ranks of this replica.
        state = board.folder / name_of(trainer.global_step, f"{board.joining[0]:04x}{board.joining[1]:04x}")
        state.mkdir(mode=0o700, exist_ok=True)
        data = written_part(part_of(checkpoint, trainer.is_global_zero, True))
        write_part(state / part_name(board.stage, board.stages), data)
        if board.stage == 0:
            board.invite(state.name)
