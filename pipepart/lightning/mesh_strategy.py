"""The part of the strategy that knows who is where: ranks as replicas x stages, and the collectives of Lightning on them."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from pipepart.errors import ConfigError
from pipepart.lightning.loaders import ends_together, needs_agreement
from pipepart.lightning.materialise import empty_names
from pipepart.options import Options
from pipepart.runtime import Groups, Mesh, fit_mesh
from pipepart.runtime.device import backend_for, limit_threads
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object, gather_objects, meet
from pipepart.runtime.rendezvous import local_store, name_job

__all__ = ["MeshStrategy", "same_weights_everywhere"]


class MeshStrategy(ParallelStrategy):
    """Ranks as a table of replicas x stages. What Lightning spreads over ranks is spread over replicas."""

    def __init__(
        self,
        options: Options,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._options = options
        self._num_nodes = 1
        self._layer_sync: Any = None  # set by the trainer for sync_batchnorm=True, which is refused
        self._mesh: Mesh | None = None
        self._groups: Groups | None = None

    # ---- who is where

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            devices = self.num_nodes * self.num_processes
            self._mesh = fit_mesh(devices, self._options.stages, self._options.replicas)
        return self._mesh

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def is_distributed(self) -> bool:
        """For Lightning: whether data is divided among ranks. The stages of one replica work on the same data."""
        return self.mesh.replicas > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.replicas, "rank": self.mesh.replica_of(self.global_rank)}

    def describe_nodes(self) -> str:
        """Which node has which stages: those of a replica are neighbours, so that few edges leave a node."""
        lines = []
        for node in range(self.num_nodes):
            ranks = range(node * self.num_processes, (node + 1) * self.num_processes)
            places = [f"replica {self.mesh.replica_of(r)} stage {self.mesh.stage_of(r)}" for r in ranks]
            lines.append(f"node {node}     {', '.join(places)}")
        return "\n".join(lines)

    def set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        _ = self.mesh  # devices that do not fit the stages are an error here, before any process is started
        if not self.cluster_environment.creates_processes_externally:
            name_job()
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        limit_threads(self.num_processes)
        timeout = timedelta(seconds=self._options.timeout)
        try:
            self._join_job(timeout)
        except BaseException:  # the processes that this one has started would wait for it
            if self._launcher is not None:
                self._launcher.kill(signal.SIGTERM)
            raise
        if self._groups is None and self.mesh.world_size > 1:
            self._groups = Groups.create(self.mesh, timeout)

    def _join_job(self, timeout: timedelta) -> None:
        assert self.cluster_environment is not None
        where, store = self.cluster_environment, None
        if not dist.is_initialized():
            store = local_store(where.main_address, where.main_port, self.global_rank, self.world_size, timeout)
        _init_dist_connection(where, backend_for(self.root_device), timeout=timeout, store=store)

    def model_to_device(self) -> None:
        assert self.model is not None
        if not empty_names(self.model):
            self.model.to(self.root_device)
            return
        # What is on the meta device is filled on the device later; `to` would refuse it.
        self.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.root_device))
        _update_properties(self.model, device=self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """`trainer.init_module(empty_init=True)` builds on the meta device; each rank fills its own part when it is known."""
        with ExitStack() as stack:
            if empty_init:
                stack.enter_context(torch.device("meta"))
                stack.enter_context(self.precision_plugin.tensor_init_context())
            else:
                stack.enter_context(super().tensor_init_context(empty_init))
            yield

    # ---- collectives

    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            with guarded(self._groups):
                if self._groups is None:
                    dist.barrier()
                else:
                    meet(self._groups)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        if self._groups is not None:
            with guarded(self._groups):
                return broadcast_object(obj, src, self._groups)
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the replicas: the stages of one replica have the same values."""
        if not isinstance(tensor, torch.Tensor) or self._groups is None or self._groups.copies is None:
            return tensor
        with guarded(self._groups):
            return _sync_ddp_if_available(tensor, group or self._groups.copies, reduce_op=reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """One entry for each replica: the stages of one replica have the same values."""
        if group is None or group is dist.group.WORLD:
            if self._groups is None:
                return tensor
            if self._groups.copies is None:
                return tensor.unsqueeze(0)
            group = self._groups.copies
        with guarded(self._groups):
            return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks: stages may see different things (time, signals)."""
        if not _distributed_is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        with guarded(self._groups):
            dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Streams end on all ranks together: when the first stage of a replica has no more."""
        if self._groups is None or not needs_agreement(dataloader):
            return dataloader
        reads = self._groups.stage == 0
        return ends_together(dataloader, reads, lambda more: self.reduce_boolean_decision(more, all=True))


def same_weights_everywhere(module: LightningModule, groups: Groups | None) -> None:
    """Rank 0's weights and buffers for all, so that it does not matter how each rank has seeded."""
    if groups is None:
        return
    empty = empty_names(module)
    everywhere = gather_objects((len(empty), hashlib.sha256("\n".join(empty).encode()).hexdigest()), groups)
    if len(set(everywhere)) > 1:
        raise ConfigError(
            f"ranks have built {type(module).__name__} with different parts on the meta device (tensors without memory "
            f"by rank: {[count for count, _ in everywhere]}). Build it the same way on every rank."
        )
    meet(groups)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                dist.broadcast(tensor.data, 0)
