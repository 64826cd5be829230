"""Workers of Ray Train, which Ray has started and connected. A strategy inside one knows its ranks from Ray.

A worker sees one device of its own, whatever `Trainer(devices=...)` says, and the numbers of workers on hosts may differ. So
the ranks do not come from devices and nodes.
"""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

import torch

from pipepart.errors import ConfigError
from pipepart.lightning.binding import kind_in
from pipepart.lightning.namespaces import of
from pipepart.lightning.run_patches import RunPatches
from pipepart.runtime.rendezvous import TOKEN

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment
else:
    ClusterEnvironment = object

__all__ = ["RayWorkers", "environment_here", "in_worker", "refuse_shards_by_rank"]

_SPLITS = "ray.data._internal.iterator.stream_split_iterator"
_READ = "_to_ref_bundle_iterator"


def in_worker() -> bool:
    """Whether this process is a worker of Ray Train. Ray has imported its own package there."""
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return False
    try:
        return int(train.get_context().get_world_size()) > 0
    except Exception:  # outside of a worker, Ray raises one error or another, by its version
        return False


def environment_here(found: Any) -> Any:
    """The environment of this process: the one that Lightning has found, or that of Ray in a worker."""
    if found is None or isinstance(found, RayWorkers) or not in_worker():
        return found
    return kind_in(RayWorkers, of(found).ClusterEnvironment)()


class RayWorkers(ClusterEnvironment):
    """The ranks of a worker, by Ray. They are the numbers that Ray has connected `torch.distributed` with."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return in_worker()

    def world_size(self) -> int:
        return int(self._context.get_world_size())

    def set_world_size(self, size: int) -> None:
        """Change nothing: the number is that of Ray."""

    def global_rank(self) -> int:
        return int(self._context.get_world_rank())

    def set_global_rank(self, rank: int) -> None:
        """Change nothing: the rank is that of Ray."""

    def local_rank(self) -> int:
        return int(self._context.get_local_rank())

    def node_rank(self) -> int:
        return int(self._context.get_node_rank())

    def workers_here(self) -> int:
        """The number of workers on this host."""
        return int(self._context.get_local_world_size())

    def device(self, kind: str) -> torch.device:
        """The device of this worker. Ray may have reserved one that the trainer does not use."""
        if kind == "cpu":
            return torch.device(kind)
        found: torch.device = sys.modules["ray.train"].torch.get_device()
        if found.type != kind:
            raise ConfigError(
                f"the trainer wants a device of type {kind!r}, but Ray has given this worker {str(found)!r}. Use "
                "ScalingConfig(use_gpu=True), or Trainer(accelerator='cpu')."
            )
        return found

    def share_secret(self) -> None:
        """Give all workers one secret, with which they sign what they send to each other. All workers must call it together.

        The store of Ray's connection serves everyone who reaches its port. The secret travels inside Ray.
        """
        if TOKEN not in os.environ:
            from ray.train.collective import broadcast_from_rank_zero

            os.environ[TOKEN] = broadcast_from_rank_zero(secrets.token_hex(16))

    @property
    def _context(self) -> Any:
        return sys.modules["ray.train"].get_context()


def refuse_shards_by_rank(environment: Any, stages: int, patches: RunPatches) -> None:
    """Refuse shards that Ray makes for each worker: the stages of a replica must read the same data."""
    home: Any = sys.modules.get(_SPLITS)
    kind = getattr(home, "StreamSplitDataIterator", None)
    if stages == 1 or not isinstance(environment, RayWorkers) or not hasattr(kind, _READ):
        return

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"Ray divides this dataset among all workers, but the {stages} stages of a replica must read the same data. Use "
            f"TorchTrainer(dataset_config=pipepart.ray.ReplicaDataConfig(stages={stages})), which divides it among replicas."
        )

    patches.put(kind, _READ, refuse)
