"""Numbers of processes as code of the user expects them where it prepares training: those of a job that divides its data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipepart.lightning.lightning_step import with_class
from pipepart.runtime import Mesh

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["counted_by_replicas"]


@contextmanager
def counted_by_replicas(trainer: Trainer, mesh: Mesh) -> Iterator[None]:
    """Inside, `trainer.world_size` and `trainer.num_devices` are numbers of replicas.

    Modules scale learning rates by them, for the batch of all processes together. The stages of a replica have one batch.
    """
    if mesh.stages == 1 and trainer.world_size == mesh.replicas:
        yield
        return
    members = {
        "world_size": property(lambda self: mesh.replicas),
        "num_devices": property(lambda self: max(1, mesh.replicas // self.num_nodes)),
    }
    with with_class(trainer, members):
        yield
