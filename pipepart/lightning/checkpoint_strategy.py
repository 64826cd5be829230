"""The part of the strategy that saves and loads: one plain file, as one device would write it, or a directory of shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch.optim import Optimizer

from pipepart.errors import PlanError
from pipepart.lightning import sharded as shards
from pipepart.lightning.checkpoint_io import CheckpointError, SafeCheckpointIO, verify
from pipepart.lightning.mesh_strategy import MeshStrategy
from pipepart.lightning.optimizers import full_optimizer_state, load_full_optimizer_state, own_optimizer_state
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded

__all__ = ["CheckpointStrategy"]


class CheckpointStrategy(MeshStrategy):
    """Checkpoints of a model of which each rank holds a part."""

    sharded = False
    _runtime: StageRuntime | None = None

    @property
    def runtime(self) -> StageRuntime:
        if self._runtime is None:
            raise PlanError("the pipeline is not set up yet: it is planned when the trainer starts, on its first batch")
        return self._runtime

    @property
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = SafeCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO) and self._checkpoint_io.checkpoint_io is None:
            self._checkpoint_io.checkpoint_io = SafeCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        parts = self.runtime.parts
        return parts.own_state_dict() if self.sharded else parts.full_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return own_optimizer_state(plain) if self.sharded else full_optimizer_state(plain, self.runtime)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """If one rank cannot write, all raise."""
        if self.sharded:
            shards.save(checkpoint, filepath, self.runtime, self._together)
            return

        def write() -> None:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

        self._together(write)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Rank 0 checks that the files are what was written; every rank reads what it needs of them."""

        def check() -> None:
            if self.is_global_zero:
                shards.bring_back(checkpoint_path)
                (shards.verify_shards if shards.is_sharded(checkpoint_path) else verify)(checkpoint_path)

        self._together(check)
        if shards.is_sharded(checkpoint_path):
            return shards.load_rest(checkpoint_path, weights_only)
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def _together(self, action: Callable[[], None]) -> None:
        """Do something that may fail on one rank: then it fails on all, with the same words."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        failures: list[Any] = [str(failure) if failure is not None else None]
        if self._groups is not None:
            failures = [None] * self.mesh.world_size
            with guarded(self._groups):
                dist.all_gather_object(failures, str(failure) if failure is not None else None)
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text is not None:
                raise CheckpointError(f"rank {rank} failed: {text}")

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "pipepart_shards" in checkpoint:
            shards.load_model(dict(checkpoint), self.runtime, strict)
        else:
            self.runtime.load_full_state_dict(dict(checkpoint["state_dict"]), strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for number, optimizer in enumerate(self.optimizers):
            if "pipepart_shards" in checkpoint:
                shards.load_optimizer(dict(checkpoint), number, optimizer)
            else:
                load_full_optimizer_state(optimizer, checkpoint["optimizer_states"][number])
