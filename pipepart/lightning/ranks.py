"""Ranks of a run as replicas x stages, and Lightning's collectives on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.devices import backend_for
from pipepart.errors import ConfigError
from pipepart.lightning.data import ends_together, needs_agreement
from pipepart.lightning.materialise import empty_names
from pipepart.lightning.namespaces import either, loaded, of
from pipepart.lightning.ray_workers import RayWorkers
from pipepart.options import Options
from pipepart.parent import outlive_parent
from pipepart.runtime import Groups, Mesh, fit_mesh
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object, gather_objects, meet, reduce_numbers
from pipepart.runtime.rendezvous import leave_environment, listen_locally, meeting_store
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.runtime.watcher import watch

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

__all__ = ["RankCollectives", "Ranks"]


class Ranks:
    """The ranks of a job, their process groups and collectives. Lightning divides data over replicas, not over ranks.

    Collectives use the groups of pipepart only: the default group may be one of the user's program, without a backend for
    host memory. Votes, flags and objects travel in host memory, so that the host does not wait for the device.
    """

    def __init__(self, options: Options, devices: Callable[[], int], device: Callable[[], torch.device]) -> None:
        """`devices` returns the number of processes, `device` that of this process.

        They are called when the trainer has connected its environment.
        """
        self._options, self._devices, self._device = options, devices, device
        self.groups: Groups | None = None
        """None before `join`, and in a job of one process."""

    @property
    def device(self) -> torch.device:
        return self._device()

    @cached_property
    def mesh(self) -> Mesh:
        return fit_mesh(self._devices(), self._options.stages, self._options.replicas)

    @property
    def timeout(self) -> float:
        """Seconds that ranks wait for each other."""
        return self._options.timeout

    def join(self, environment: ClusterEnvironment, device: torch.device, nodes: int) -> None:
        """Connect this process with the others of the job. Every rank must call it. A second call changes nothing.

        A job of one process has no group, as on one device: Lightning and torchmetrics ask for one to see whether to reduce.
        """
        timeout, store = timedelta(seconds=self.timeout), None
        if self.mesh.world_size == 1 or environment.world_size() == 1:
            return
        if not dist.is_initialized():
            rank, world = environment.global_rank(), environment.world_size()
            address, port = environment.main_address, environment.main_port
            store = meeting_store(address, port, rank, world, timeout, one_host=nodes == 1)
        if isinstance(environment, RayWorkers):
            environment.share_secret()
        listen_locally()
        with closed_to_strangers():
            of(environment)._init_dist_connection(environment, backend_for(device), timeout=timeout, store=store)
        if isinstance(environment, either("LightningEnvironment")):  # the launcher has tied this process to rank 0
            outlive_parent()
        _ = self._connected

    def leave(self) -> None:
        """End a run: the environment of this process is that of the user again."""
        leave_environment()

    def tell(self, failure: BaseException) -> None:
        """Tell the other ranks that this one ends with a failure, for example in a hook, in which it waits for nobody."""
        if isinstance(failure, Exception) and not isinstance(
            failure, either("SIGTERMException")
        ):  # all ranks raise that
            with suppress(Exception), guarded(self.groups):
                raise failure

    def describe_nodes(self, node: int) -> str:
        """The stages on each node, one line per node; empty for a single node. `node` is the number of this one.

        All ranks must call it together. The stages of a replica are neighbours, so that few edges cross nodes.
        """
        places: dict[int, list[str]] = {}
        for rank, number in enumerate(self.gather(node)):
            places.setdefault(number, []).append(
                f"replica {self.mesh.replica_of(rank)} stage {self.mesh.stage_of(rank)}"
            )
        if len(places) == 1:
            return ""
        return "".join(f"\nnode {number}     {', '.join(places[number])}" for number in sorted(places))

    # ---- collectives

    @property
    def _connected(self) -> Groups | None:
        """The groups; None in a job of one process, and before it is connected.

        They are made at the first use, which may be before a run in a job that the user's program has connected.
        """
        if self.groups is None and dist.is_initialized() and self.mesh.world_size > 1:
            self.groups = Groups.create(self.mesh, timedelta(seconds=self.timeout), self.device)
            watch(self.groups)
        return self.groups

    def barrier(self) -> None:
        groups = self._connected
        if groups is not None:
            with guarded(groups):
                meet(groups)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        groups = self._connected
        if groups is None:
            return obj
        with guarded(groups):
            return broadcast_object(obj, src, groups)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        groups = self._connected
        if groups is None:
            return [value]
        with guarded(groups):
            return gather_objects(value, groups)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor in place over the replicas. The stages of one replica have equal values."""
        groups = self._connected
        if not isinstance(tensor, torch.Tensor) or groups is None or groups.copies is None:
            return tensor
        chosen = groups.copies if _is_default(group) else group
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        mean = name in ("mean", "avg", dist.ReduceOp.AVG)  # gloo has no mean
        if mean or name is None:
            op: Any = dist.ReduceOp.SUM
        else:
            op = getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) else name
        with guarded(groups):
            dist.all_reduce(tensor, op, group=chosen)
        if not mean:
            return tensor
        count = dist.get_world_size(chosen)
        return tensor.div_(count) if tensor.is_floating_point() else tensor.copy_(tensor / count)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """One entry for each replica. The stages of one replica have equal values."""
        groups = self._connected
        if _is_default(group):
            if groups is None:
                return tensor
            if groups.copies is None:
                return tensor.unsqueeze(0)
            group = groups.copies
        with guarded(groups):
            gathered: torch.Tensor = loaded()._all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)
        return gathered

    def decide(self, decision: bool, all: bool = True) -> bool:
        """Whether the decision is true on all ranks (or on any). Stages of one replica may differ (time, signals)."""
        groups = self._connected
        if groups is None:
            return decision
        votes = torch.tensor(int(decision))
        with guarded(groups):
            reduce_numbers(votes, groups, groups.world, dist.ReduceOp.SUM)
        return bool(votes == self.mesh.world_size) if all else bool(votes)

    # ---- data and weights

    def loader(self, dataloader: Any, decide: Callable[[bool], bool]) -> Any:
        """The loader of this rank. Streams end on all ranks when the first stage of a replica has no more data.

        `decide` returns whether all ranks agree, as the method of this name does.
        """
        if self.groups is None or not needs_agreement(dataloader):
            return dataloader
        return ends_together(dataloader, self.groups.stage == 0, decide)

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
                    dist.broadcast(tensor.data, 0, group=self.groups.world)


def _is_default(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


class RankCollectives:
    """The collectives of a strategy of Lightning, by its ranks."""

    _ranks: Ranks

    def barrier(self, name: str | None = None) -> None:
        self._ranks.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._ranks.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._ranks.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return self._ranks.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._ranks.decide(decision, all)
