"""One replica as a job of its own, which shares gradients with the others on a board and goes on if one of them is lost.

Under the Trainer, such a job is one with a single replica. It differs in this: training data is divided among all replicas,
while each evaluates all samples, so that all decide alike; the mean of gradients is that of `BoardMean`; one replica writes
checkpoints; and a replica that was started again takes the state of another one in place of a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from pipepart.errors import ConfigError
from pipepart.lightning.announce import tell
from pipepart.lightning.data import LoaderAround, needs_agreement, unwrapped
from pipepart.lightning.namespaces import overridden
from pipepart.lightning.pipeline_strategy import PipelineStrategy
from pipepart.runtime import Mesh
from pipepart.runtime.replica_board import REPLICA, Board, Start
from pipepart.runtime.sync.board_mean import BoardMean
from pipepart.spare_files import SPARE_FOLDER, parts_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["ReplicaPlace", "ReplicaStrategy", "refused"]

_PLAN = "plan.json"
_JOIN = "join"


@dataclass(frozen=True)
class ReplicaPlace:
    """The place of a job among the replicas of a run."""

    folder: Path
    """The folder in memory that all of them use."""
    start: Start
    """The replica, and the number of its start. A start after the first one joins the others."""
    replicas: int

    @staticmethod
    def here() -> ReplicaPlace | None:
        """The place of this process; None in other runs."""
        if REPLICA not in os.environ:
            return None
        replica, start, replicas = map(int, os.environ[REPLICA].split("/"))
        return ReplicaPlace(Path(os.environ[SPARE_FOLDER]), (replica, start), replicas)

    @property
    def first(self) -> bool:
        return self.start[0] == 0

    @property
    def joins(self) -> bool:
        return self.start[1] > 0

    @property
    def checkpoint(self) -> str:
        """What a replica that joins resumes from."""
        return str(self.folder / _JOIN)

    def plan(self) -> str | None:
        """The file of the plan of the first replica; None if this replica has to make it."""
        path = self.folder / _PLAN
        if self.first and not self.joins:
            return None
        Board.await_files(path.exists)
        return str(path)


class ReplicaStrategy(PipelineStrategy):
    """The strategy of a job that is one of several replicas. All of its other options are those of one replica."""

    def __init__(self, place: ReplicaPlace, **options: Any) -> None:
        super().__init__(**options)
        self._place = place
        self.board: Board | None = None
        """The board of this rank, once there is a plan."""
        self.resumes = False
        """Whether batches of the current epoch that the others have had are left out."""

    # ---- data

    @property
    def data_mesh(self) -> Mesh:
        return Mesh(self._place.replicas, self.mesh.stages)

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        _, trainer = self._module_and_trainer()
        if trainer.training:
            return {"num_replicas": self._place.replicas, "rank": self._place.start[0]}
        return {"num_replicas": 1, "rank": 0}

    def process_dataloader(self, dataloader: Any) -> Any:
        _, trainer = self._module_and_trainer()
        if trainer.training:
            _check_loader(dataloader)
        loader = super().process_dataloader(dataloader)
        if not (self._place.joins and trainer.training):
            return loader
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        return _FromBatch(loader, lambda: progress.current.ready if self.resumes else 0)

    # ---- set-up

    def setup_environment(self) -> None:
        module, trainer = self._module_and_trainer()
        _check(trainer, module, self)
        super().setup_environment()

    def _build(self, trainer: Trainer, module: LightningModule, step: str, example: Any, loader: int | None) -> None:
        super()._build(trainer, module, step, example, loader)
        place, runtime = self._place, self.runtime
        if self._recorded.empty:
            raise refused("a module on the meta device")
        if place.first and not place.joins and runtime.stage == 0:
            unfinished = place.folder / f"{_PLAN}.unfinished"
            self.plan.save(unfinished)
            os.replace(unfinished, place.folder / _PLAN)
        self.board = Board(
            place.folder, place.start, place.replicas, runtime.stage, self.mesh.stages, self._ranks.timeout
        )
        if self.is_global_zero:
            self.board.changed = _said
        runtime.parameters.sync.replicas = BoardMean(self.board, lambda: _settings(trainer))
        runtime.seeds.replica = place.start[0]

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A replica joins when it is ready to train, so that the others do not wait for its set-up."""
        return self._place.joins

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if str(checkpoint_path) != self._place.checkpoint:
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.board is not None, "the run was set up before"
        self.board.ready()
        state, stages = self._place.folder / self.board.accept(), self.mesh.stages
        self.board.await_files(lambda: len(parts_of(state)) == stages)
        self.resumes = True
        return super().load_checkpoint(state, weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One replica writes what is equal on all: the first one that is there."""
        if self.board is not None and self._writes:
            with self.board.busy():
                super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._writes:
            super().remove_checkpoint(filepath)

    @property
    def _writes(self) -> bool:
        return self.board is not None and self.board.donor == self._place.start[0]


class _FromBatch(LoaderAround):
    """A loader that leaves out the first batches when it is opened: `count` tells how many."""

    def __init__(self, loader: Any, count: Callable[[], int]) -> None:
        super().__init__(loader, _count=count)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        count = self._count()  # when the first batch is asked for: the sampler knows its epoch then
        batches = iter(self._loader)
        for _ in range(count):
            next(batches, None)
        yield from batches


def _settings(trainer: Trainer) -> int:
    """A number of what must be equal on all replicas, since each decides on it alone."""
    rates = [[group.get("lr") for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    values = repr(([[float(rate) for rate in one if rate is not None] for one in rates], trainer.global_step))
    return int.from_bytes(hashlib.sha256(values.encode()).digest()[:7], "little")


def _said(text: str) -> None:
    tell(f"pipepart: {text}\n")


def refused(what: str, instead: str = "") -> ConfigError:
    return ConfigError(
        f"launcher.lost_replica=continue is not for {what}: {instead or 'use launcher.lost_replica=null'}"
    )


def _check(trainer: Trainer, module: LightningModule, strategy: Any) -> None:
    """Refuse what replicas that may be lost cannot do."""
    if strategy.root_device.type != "cpu":
        raise refused(
            f"the device {strategy.root_device}", "gradients are shown in host memory; use trainer.accelerator=cpu"
        )
    if not module.automatic_optimization:
        raise refused("manual optimization")
    if overridden("backward", module, "LightningModule"):
        raise refused(f"{type(module).__name__}.backward", "change gradients in on_after_backward")
    if strategy._layer_sync is not None:
        raise refused("sync_batchnorm=True, with which replicas wait for each other in each step")
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        raise refused("trainer.overfit_batches")
    if not trainer._accelerator_connector.use_distributed_sampler:
        raise refused("use_distributed_sampler=False: replicas would train on the same samples")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if type(callback).__name__ == "Timer":
            raise refused("trainer.max_time: replicas would end after different steps", "use trainer.max_steps")


def _check_loader(loader: Any) -> None:
    loader = unwrapped(loader)
    if not isinstance(loader, DataLoader) or needs_agreement(loader):
        raise refused("streams of training data", "use a DataLoader of a dataset with an index")
