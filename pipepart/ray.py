"""Training in workers of Ray Train: `PipelineStrategy` in the trainer, and what is Ray's own around it.

```python
def work():                                        # in each worker
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=2), devices="auto", accelerator="auto",
        callbacks=[pipepart.ray.ReportCheckpoint()], enable_checkpointing=False,
    )
    trainer = pipepart.ray.prepare_trainer(trainer)
    with pipepart.ray.newest_checkpoint() as path:  # None at the first start
        trainer.fit(MyModule(), datamodule, ckpt_path=path)

TorchTrainer(work, scaling_config=ScalingConfig(num_workers=4), run_config=RunConfig(failure_config=FailureConfig(3))).fit()
```
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pipepart.errors import ConfigError
from pipepart.lightning import PipelineStrategy
from pipepart.lightning.binding import OwnCallback
from pipepart.lightning.ray_workers import in_worker
from pipepart.values import COUNT, check_number

try:
    import ray.train
    from ray.train import Checkpoint, DataConfig
except ImportError as missing:
    raise ImportError('pipepart.ray needs Ray Train: pip install "pipepart[ray]"') from missing

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["ReplicaDataConfig", "ReportCheckpoint", "newest_checkpoint", "prepare_trainer"]

_NAME = "checkpoint.ckpt"
"""The checkpoint inside one of Ray, as in Ray's own callback for Lightning."""


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Check a trainer before its first run in a worker; returns it. The strategy itself finds out that it is in one."""
    if not in_worker():
        raise ConfigError(
            "pipepart.ray.prepare_trainer was called outside of a worker of Ray Train. Call it in the function that you give "
            "to ray.train.torch.TorchTrainer."
        )
    if not isinstance(trainer.strategy, PipelineStrategy):
        raise ConfigError(
            f"the strategy of the trainer is {type(trainer.strategy).__name__}; expected pipepart.PipelineStrategy. For "
            "strategies of Ray use ray.train.lightning.prepare_trainer."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(kind.__name__ == "RayTrainReportCallback" for kind in type(callback).__mro__):
            raise ConfigError(
                f"{type(callback).__name__} saves a checkpoint under another path on each rank, but the ranks of a pipeline "
                "write one checkpoint together. Use pipepart.ray.ReportCheckpoint in its place."
            )
    return trainer


class ReportCheckpoint(OwnCallback):
    """Reports the logged metrics and a checkpoint, plain or sharded, to Ray at the end of each n-th epoch of training.

    With `every_n_train_steps` it does so after each n-th step of the optimizer. `folder` is the place in which a checkpoint is
    written before Ray copies it to its storage; default: the folder of temporary files of the host of rank 0. A sharded
    checkpoint of workers on several hosts needs a folder on a disk that they share.
    """

    def __init__(
        self, *, every_n_epochs: int = 1, every_n_train_steps: int | None = None, folder: str | Path | None = None
    ) -> None:
        check_number("every_n_epochs", every_n_epochs, COUNT, whole=True)
        if every_n_train_steps is not None:
            check_number("every_n_train_steps", every_n_train_steps, COUNT, whole=True)
        self.every_n_epochs, self.every_n_train_steps, self.folder = every_n_epochs, every_n_train_steps, folder
        self._reported = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reported = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        every, step = self.every_n_train_steps, trainer.global_step
        if every is not None and step % every == 0 and step != self._reported:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_train_steps is None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        self._reported, first = trainer.global_step, trainer.global_rank == 0
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if _is_number(value)}
        made = tempfile.mkdtemp(prefix="pipepart-ray-", dir=self.folder) if first else ""
        folder = trainer.strategy.broadcast(made)
        try:
            trainer.save_checkpoint(Path(folder) / _NAME)
            found = Checkpoint.from_directory(folder) if first else None
            ray.train.report({**metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}, checkpoint=found)
        finally:
            if first:
                shutil.rmtree(folder, ignore_errors=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


@contextmanager
def newest_checkpoint() -> Iterator[str | None]:
    """Inside, the path of the newest checkpoint that was reported to Ray, for `ckpt_path`; None if there is none.

    Workers that Ray starts again after a failure go on from it. Their number, and the stages and replicas, may be others.
    """
    found = ray.train.get_checkpoint()
    if found is None:
        yield None
        return
    with found.as_directory() as folder:
        yield str(Path(folder) / _NAME)


class ReplicaDataConfig(DataConfig):
    """Divides datasets of Ray among the replicas: the stages of a replica read the same shard, in the same order.

    Ray's own division gives each worker another shard. The datasets are computed once and kept in the memory of Ray's object
    store (which spills to disks). Those that are not in `datasets_to_split` are read by every replica as a whole.
    """

    def __init__(self, stages: int, datasets_to_split: Literal["all"] | Sequence[str] = "all") -> None:
        check_number("stages", stages, COUNT, whole=True)
        super().__init__(datasets_to_split if datasets_to_split == "all" else list(datasets_to_split))
        self.stages, self._names = stages, datasets_to_split

    def configure(
        self, datasets: dict[str, Any], world_size: int, worker_handles: Any, worker_node_ids: Any, **kwargs: Any
    ) -> list[dict[str, Any]]:
        if world_size % self.stages:
            raise ConfigError(f"{world_size} workers are no whole number of replicas with {self.stages} stages")
        replicas = world_size // self.stages
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            divided = self._names == "all" or name in self._names
            whole = dataset.materialize()
            parts = whole.split(replicas, equal=True) if divided and replicas > 1 else [whole] * replicas
            for rank in range(world_size):
                shards[rank][name] = parts[rank // self.stages].iterator()
        return shards
