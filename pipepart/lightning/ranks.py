"""Ranks of a run as replicas x stages, and Lightning's collectives on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from torch import nn

from pipepart.devices import backend_for
from pipepart.errors import ConfigError
from pipepart.lightning.data import ends_together, needs_agreement
from pipepart.lightning.materialise import empty_names
from pipepart.options import Options
from pipepart.parent import outlive_parent
from pipepart.runtime import Groups, Mesh, fit_mesh
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object, gather_objects, meet
from pipepart.runtime.rendezvous import meeting_store
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.runtime.watcher import watch

__all__ = ["Ranks"]


class Ranks:
    """The ranks of a job, their process groups and collectives. Lightning divides data over replicas, not over ranks."""

    def __init__(self, options: Options, devices: Callable[[], int]) -> None:
        """`devices` returns the number of processes. It is called when the trainer has connected its environment."""
        self._options, self._devices = options, devices
        self.groups: Groups | None = None
        """None before `join`, and in a job of one process."""
        self.device = torch.device("cpu")

    @cached_property
    def mesh(self) -> Mesh:
        return fit_mesh(self._devices(), self._options.stages, self._options.replicas)

    @property
    def timeout(self) -> float:
        """Seconds that ranks wait for each other."""
        return self._options.timeout

    def join(self, environment: ClusterEnvironment, device: torch.device, nodes: int) -> None:
        """Connect this process with the others of the job. Every rank must call it. A second call changes nothing."""
        self.device = device
        timeout, store = timedelta(seconds=self.timeout), None
        if not dist.is_initialized():
            rank, world = environment.global_rank(), environment.world_size()
            address, port = environment.main_address, environment.main_port
            store = meeting_store(address, port, rank, world, timeout, one_host=nodes == 1)
        with closed_to_strangers():
            _init_dist_connection(environment, backend_for(device), timeout=timeout, store=store)
        if isinstance(environment, LightningEnvironment):  # the launcher has tied this process to rank 0
            outlive_parent()
        if self.groups is None and self.mesh.world_size > 1:
            self.groups = Groups.create(self.mesh, timeout, device)
            watch(self.groups)

    def describe_nodes(self, nodes: int) -> str:
        """The stages on each node, one line per node; empty for a single node.

        The stages of a replica are neighbours, so that few edges cross nodes.
        """
        if nodes == 1:
            return ""
        count = self.mesh.world_size // nodes
        lines = []
        for node in range(nodes):
            ranks = range(node * count, (node + 1) * count)
            places = [f"replica {self.mesh.replica_of(r)} stage {self.mesh.stage_of(r)}" for r in ranks]
            lines.append(f"\nnode {node}     {', '.join(places)}")
        return "".join(lines)

    # ---- collectives

    def barrier(self) -> None:
        if _distributed_is_initialized():
            with guarded(self.groups):
                dist.barrier() if self.groups is None else meet(self.groups)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized() or dist.get_world_size() == 1:
            return obj
        if self.groups is not None:
            with guarded(self.groups):
                return broadcast_object(obj, src, self.groups)
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.groups is None:
            return [value]
        with guarded(self.groups):
            return gather_objects(value, self.groups)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas. The stages of one replica have equal values."""
        if not isinstance(tensor, torch.Tensor) or self.groups is None or self.groups.copies is None:
            return tensor
        with guarded(self.groups):
            return _sync_ddp_if_available(tensor, group or self.groups.copies, reduce_op=reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """One entry for each replica. The stages of one replica have equal values."""
        if group is None or group is dist.group.WORLD:
            if self.groups is None:
                return tensor
            if self.groups.copies is None:
                return tensor.unsqueeze(0)
            group = self.groups.copies
        with guarded(self.groups):
            return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

    def decide(self, decision: bool, all: bool = True) -> bool:
        """Whether the decision is true on all ranks (or on any). Stages of one replica may differ (time, signals)."""
        if not _distributed_is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.device)
        with guarded(self.groups):
            dist.all_reduce(votes)
        return bool(votes == self.mesh.world_size) if all else bool(votes)

    # ---- data and weights

    def loader(self, dataloader: Any) -> Any:
        """The loader of this rank. Streams end on all ranks when the first stage of a replica has no more data."""
        if self.groups is None or not needs_agreement(dataloader):
            return dataloader
        return ends_together(dataloader, self.groups.stage == 0, self.decide)

    def share_weights(self, module: nn.Module) -> None:
        """Copy the weights and buffers of rank 0 to all ranks, so that the seeds of ranks may differ."""
        if self.groups is None:
            return
        empty = empty_names(module)
        built = gather_objects((len(empty), hashlib.sha256("\n".join(empty).encode()).hexdigest()), self.groups)
        if len(set(built)) > 1:
            raise ConfigError(
                f"ranks have built {type(module).__name__} with different parts on the meta device (tensors without memory "
                f"by rank: {[count for count, _ in built]}). Build it the same way on every rank."
            )
        meet(self.groups)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.is_meta:
                    dist.broadcast(tensor.data, 0)
