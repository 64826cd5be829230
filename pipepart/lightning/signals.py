"""SIGTERM: all ranks finish the step, save, and leave together, whichever of them were told.

Lightning talks to the other ranks from inside its signal handler. A rank of a pipeline may be waiting for another stage
at that moment, so here a handler only takes a note, and the ranks compare notes between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pipepart.lightning.announce import tell
from pipepart.lightning.run_patches import RunPatches
from pipepart.runtime import Groups
from pipepart.runtime.failure import guarded

__all__ = ["Signals"]

_log = logging.getLogger("pipepart")


class Signals:
    """The signals that this rank got, and what all ranks make of them."""

    def __init__(self, trainer: Trainer, groups: Groups | None, device: torch.device, patches: RunPatches) -> None:
        self._trainer, self._groups, self._device = trainer, groups, device
        self._terminate = self._requeue = False
        connector: Any = trainer._signal_connector
        self._save_and_requeue: Callable[[int, Any], None] = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
        patches.put(connector, "_sigterm_notifier_fn", self._on_sigterm)
        patches.put(connector, "_slurm_sigusr_handler_fn", self._on_requeue)
        patches.put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._between_steps)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if not self._terminate:
            launcher: Any = self._trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(number)
        self._terminate = True
        if self._groups is None:  # nobody to agree with
            self._trainer._signal_connector.received_sigterm = True

    def _on_requeue(self, number: int, frame: Any) -> None:
        self._requeue = True
        if self._groups is None:
            self._requeue = False
            self._save_and_requeue(number, frame)

    def agree(self) -> None:
        """Compare notes. Afterwards `trainer.received_sigterm` is the same on all ranks."""
        if self._groups is None:
            return
        with guarded(self._groups):
            notes = torch.tensor([self._terminate, self._requeue], dtype=torch.int32, device=self._device)
            dist.all_reduce(notes, op=dist.ReduceOp.MAX)
            terminate, requeue = (bool(note) for note in notes)
        if requeue:
            self._requeue = False
            self._save_and_requeue(0, None)
        if terminate:
            self._trainer._signal_connector.received_sigterm = True

    def _between_steps(self) -> None:
        self.agree()
        if self._trainer.received_sigterm:
            raise SIGTERMException

    def save(self) -> None:
        """On all ranks together: a checkpoint of the last finished step, beside the others."""
        trainer = self._trainer
        callback = trainer.checkpoint_callback
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None:
            tell("pipepart: stopped by SIGTERM; nothing saved, since this run has no ModelCheckpoint")
            return
        path = Path(callback.dirpath) / f"sigterm-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        tell(f"pipepart: stopped by SIGTERM after step {trainer.global_step}; saved {path}")
