"""Checkpoints of a model of which each rank holds a part: one plain file, as one device writes it, or a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipepart.lightning import sharded as shards
from pipepart.lightning.checkpoint_files import CheckpointError, verify
from pipepart.lightning.namespaces import either
from pipepart.lightning.optimizers import full_optimizer_state, load_full_optimizer_state, own_optimizer_state
from pipepart.lightning.ranks import Ranks
from pipepart.lightning.remote_files import check_address, is_remote
from pipepart.lightning.spare_parts import load_spare
from pipepart.runtime import Groups, StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.job_key import prove
from pipepart.runtime.leaving import release_groups, released_with
from pipepart.runtime.meeting import exchange_objects, meet
from pipepart.runtime.mesh import own_group
from pipepart.runtime.rendezvous import limit_silence
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.spare_files import is_spare

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO

__all__ = ["Checkpoints"]

_HOST = "gloo"
_LIMIT = 6 * 3600.0
"""Seconds that ranks wait for a checkpoint that others write or check, however short the timeout of a step is."""


class Checkpoints:
    """Saves and loads checkpoints. All ranks must call each method together."""

    def __init__(self, ranks: Ranks, sharded: Callable[[], bool]) -> None:
        """`sharded` returns whether each stage writes its own part. It is called for each checkpoint."""
        self._ranks, self._sharded = ranks, sharded
        self._patient: Groups | None = None
        self._waiting: list[tuple[Mapping[str, Any], bool]] | None = None
        """Models to load when the run is set up; None while it goes on."""

    def await_setup(self) -> None:
        """Begin a run. Until `load_waiting`, models are kept: Lightning restores them before the strategy is set up."""
        self._waiting = []

    @property
    def waits_for_shards(self) -> bool:
        """Whether a model that was kept is one of shards, which stages load."""
        return any("pipepart_shards" in checkpoint for checkpoint, _ in self._waiting or ())

    def load_waiting(self, module: nn.Module, runtime: StageRuntime | None) -> None:
        """Load the models that were kept, into the stage of this rank, or into a `module` that has no plan."""
        waiting, self._waiting = self._waiting or [], None
        for checkpoint, strict in waiting:
            if runtime is not None:
                self.load_model(checkpoint, module, runtime, strict)
            elif "pipepart_shards" in checkpoint:
                raise CheckpointError(
                    f"the checkpoint {checkpoint['pipepart_shards']} cannot be loaded: this run has no batch to plan with, "
                    "and stages load their own parts. Give the strategy `example_batch`, or convert the checkpoint with "
                    "pipepart.consolidate."
                )
            else:
                module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def prepare(self) -> None:
        """Make the groups of checkpoints before there is one: later the disk may be full, also for the store of the job."""
        self._groups()

    def _groups(self) -> Groups | None:
        """The groups of the job with a limit of their own, for ranks that wait until others have written.

        A rank that fails meanwhile sends its failure, and a rank that dies closes its connections: the others notice both at
        once. They are made at the first call, which all ranks must make together, and with the help of the store of the job.
        """
        groups = self._ranks.groups
        if groups is None or (self._patient is not None and self._patient.number == groups.number):
            return self._patient if groups is not None else None
        limit, mesh = max(_LIMIT, groups.timeout), groups.mesh
        with guarded(groups), closed_to_strangers():
            meet(groups)
            lists = [[list(range(mesh.world_size))], [mesh.pipeline(replica) for replica in range(mesh.replicas)]]
            world, pipeline = (own_group(groups.rank, ranks, timedelta(seconds=limit), _HOST) for ranks in lists)
            prove(world, groups.key)  # torch unpickles what it receives over them
            prove(pipeline, groups.key)
        assert world is not None and pipeline is not None
        limit_silence(groups.timeout)  # a host that is cut off does not close its connections
        self._patient = replace(groups, world=world, pipeline=pipeline, timeout=limit)
        released_with(self._patient, release_groups, [world, pipeline])
        return self._patient

    def model_state(self, runtime: StageRuntime) -> dict[str, Any]:
        with runtime.parameters.mean_shown():
            if not self._sharded():
                return runtime.parts.full_state_dict()
            state = runtime.parts.own_state_dict()
            if runtime.parameters.loose is None and runtime.parameters.borrowed is None:
                return state
            # What is shown does not stay in the parameters.
            return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}

    def optimizer_state(self, optimizer: Optimizer, runtime: StageRuntime) -> dict[str, Any]:
        wrapped: Any = optimizer
        plain = wrapped._optimizer if isinstance(optimizer, either("LightningOptimizer")) else optimizer
        return own_optimizer_state(plain, runtime) if self._sharded() else full_optimizer_state(plain, runtime)

    def save(
        self,
        checkpoint: dict[str, Any],
        path: Any,
        runtime: StageRuntime | None,
        io: CheckpointIO,
        storage_options: Any,
    ) -> None:
        """Write a checkpoint. If one rank cannot write, all ranks raise."""
        self._check_address(path, "the checkpoint", writes=True)
        if self._sharded():
            assert runtime is not None
            shards.save(checkpoint, path, runtime, self.together, self._groups())
        else:
            self.on_rank_zero(lambda: io.save_checkpoint(checkpoint, path, storage_options=storage_options))

    def load(self, path: Any, io: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint. Rank 0 compares the files with their manifest; every rank reads the parts that it needs."""

        if is_spare(path):
            return load_spare(path, self._ranks.groups, weights_only)
        self._check_address(path, "the checkpoint", writes=False)

        def check() -> None:
            shards.bring_back(path)
            (shards.verify_shards if shards.is_sharded(path) else verify)(path)

        self.on_rank_zero(check)
        if shards.is_sharded(path):
            return shards.load_rest(path, weights_only)
        asked = (
            {} if weights_only is None else {"weights_only": weights_only}
        )  # plugins for Lightning 2.5 do not take it
        return io.load_checkpoint(path, **asked)

    def _check_address(self, path: Any, source: str, writes: bool) -> None:
        if is_remote(path):
            check_address(path, self._ranks.mesh.world_size, source, writes)

    def load_model(
        self, checkpoint: Mapping[str, Any], module: nn.Module, runtime: StageRuntime | None, strict: bool
    ) -> None:
        """Load this stage's part of the model from a checkpoint that `load` has returned; all of it if there is no plan."""
        if self._waiting is not None:
            self._waiting.append((checkpoint, strict))
            return
        if runtime is None:
            self._waiting = [(checkpoint, strict)]
            self.load_waiting(module, None)
        elif "pipepart_shards" in checkpoint:
            shards.load_model(dict(checkpoint), runtime, strict)
        else:
            runtime.load_full_state_dict(dict(checkpoint["state_dict"]), strict)

    def load_optimizers(
        self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], runtime: StageRuntime | None
    ) -> None:
        """Load this rank's part of the states of optimizers. As in Lightning, those of which there is no state begin anew."""
        for number, (optimizer, _) in enumerate(zip(optimizers, checkpoint["optimizer_states"])):
            if "pipepart_shards" in checkpoint:
                shards.load_optimizer(dict(checkpoint), number, optimizer, runtime)
            else:
                load_full_optimizer_state(optimizer, checkpoint["optimizer_states"][number], runtime)

    def on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0. If it fails, all ranks raise the same message."""
        first = self._ranks.groups is None or self._ranks.groups.rank == 0
        self.together(action if first else lambda: None)

    def together(self, action: Callable[[], None]) -> None:
        """Run an action that may fail on one rank. If it does, all ranks raise the same message."""
        groups, failure = self._groups(), None
        try:
            action()
        except Exception as error:
            failure = error
        failures: list[str | None] = [None]
        if groups is not None:
            with guarded(groups):  # not through the store of the job, which may be on the same full disk
                failures = exchange_objects(None if failure is None else str(failure), groups)
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text is not None:
                raise CheckpointError(f"rank {rank} failed: {text}")
