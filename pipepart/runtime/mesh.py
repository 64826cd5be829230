"""The mesh of ranks (replicas x stages) and the process groups between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipepart.devices import backend_for, computes_on_host
from pipepart.errors import PlanError
from pipepart.runtime.job_key import job_key, prove
from pipepart.runtime.leaving import release_groups, released_with
from pipepart.runtime.rendezvous import job_store, limit_silence, locally
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.runtime.watching import Watching

__all__ = ["Groups", "Mesh", "connect", "fit_mesh", "own_group", "unbound"]

_HOST = "gloo"  # the backend for tensors in host memory


@dataclass(frozen=True)
class Mesh:
    """The table of ranks: ``rank = replica * stages + stage``, so that the stages of a replica are neighbours.

    ```
               stage 0  stage 1  stage 2
    replica 0     0        1        2
    replica 1     3        4        5
    ```
    """

    replicas: int
    stages: int

    @property
    def world_size(self) -> int:
        return self.replicas * self.stages

    def replica_of(self, rank: int) -> int:
        return rank // self.stages

    def stage_of(self, rank: int) -> int:
        return rank % self.stages

    def rank(self, replica: int, stage: int) -> int:
        return replica * self.stages + stage

    def pipeline(self, replica: int) -> list[int]:
        """Return the ranks of one replica, in the order of their stages."""
        return [self.rank(replica, stage) for stage in range(self.stages)]

    def copies(self, stage: int) -> list[int]:
        """Return the ranks that hold this stage, one in each replica."""
        return [self.rank(replica, stage) for replica in range(self.replicas)]

    def describe(self, rank: int) -> str:
        """Return the rank with its place in the mesh, as errors name it."""
        return f"rank {rank} (replica {self.replica_of(rank)}, stage {self.stage_of(rank)})"


def fit_mesh(devices: int, stages: int | str = "auto", replicas: int | str = "auto") -> Mesh:
    """Return the mesh for `devices` processes. With ``"auto"`` for both numbers, all of them make one pipeline."""
    for name, value in (("stages", stages), ("replicas", replicas)):
        if value != "auto" and (isinstance(value, (str, bool)) or int(value) != value or value < 1):
            raise PlanError(f"{name} must be a whole number of at least 1 or 'auto', got {value!r}")
    if stages == "auto":
        if replicas != "auto" and devices % int(replicas):
            raise PlanError(
                f"devices must be a multiple of replicas: got devices={devices}, replicas={replicas}. "
                f"Use devices={_next_multiple(devices, int(replicas))} or another number of replicas."
            )
        stages = devices // (1 if replicas == "auto" else int(replicas))
    stages = int(stages)
    if devices % stages:
        raise PlanError(
            f"devices must be a multiple of stages (devices = replicas x stages): got devices={devices}, "
            f"stages={stages}. Use devices={_next_multiple(devices, stages)}, or a number of stages that divides {devices}."
        )
    if replicas == "auto":
        replicas = devices // stages
    if int(replicas) * stages != devices:
        raise PlanError(
            f"replicas x stages must equal devices: got replicas={replicas}, stages={stages}, devices={devices}. "
            f"Use devices={int(replicas) * stages}, or leave replicas to 'auto'."
        )
    return Mesh(int(replicas), stages)


def _next_multiple(devices: int, of: int) -> int:
    return max(of, devices + of - devices % of if devices % of else devices)


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank. All ranks of the job create them together."""

    mesh: Mesh
    rank: int
    device: torch.device
    world: dist.ProcessGroup
    """All ranks of the job. It is not the default group, whose timeout and backends are those of the user's program."""
    pipeline: dist.ProcessGroup
    """All stages of this replica: set-up, values of tails, outputs."""
    down: dist.ProcessGroup
    """Messages in host memory from lower to higher stages. Separate from `up`, so that each channel has one direction and
    one order, and from the default group, which Lightning uses."""
    up: dist.ProcessGroup
    """Messages in host memory from higher to lower stages."""
    copies: dist.ProcessGroup | None
    """The same stage in every replica, for gradients; None with one replica."""
    numbers: dist.ProcessGroup | None = None
    """The same stage in every replica, for plain numbers in host memory; None with one replica."""
    number: int = 0
    """The index of this set of groups in the job; the first set has 1."""
    timeout: float = 300.0
    """Seconds that ranks wait for each other."""
    key: bytes = field(default=b"", repr=False)
    """The key with which ranks sign the objects that they send to each other."""
    watching: Watching = field(default_factory=Watching, compare=False)
    """The work of this rank, and a failure of the job that its watcher has found."""
    failures: list[str] = field(default_factory=list, compare=False)
    """The failures of this rank in these groups."""
    meetings: Counter[str] = field(default_factory=Counter, compare=False)
    """The number of meetings of this rank, by the ranks that take part."""

    @staticmethod
    def create(mesh: Mesh, timeout: timedelta, device: torch.device | None = None) -> Groups:
        """Create the groups of a mesh for tensors on `device` (default: the CPU). All ranks must call it.

        `world`, `pipeline` and `copies` take tensors on the device and in host memory, the others in host memory only. The
        communicators of the device are made here, in one order on all ranks: at their first use in a step they would make
        the host wait for ranks that may wait for this one.
        """
        rank, device = dist.get_rank(), device or torch.device("cpu")
        number = int(job_store().add(f"pipepart/groups/{rank}", 1))
        replicas = [mesh.pipeline(replica) for replica in range(mesh.replicas)]
        stages = [mesh.copies(stage) for stage in range(mesh.stages)]
        both = backend_for(device)
        with closed_to_strangers():
            world = own_group(rank, [list(range(mesh.world_size))], timeout, both)
            pipeline = own_group(rank, replicas, timeout, both)
            down, up = (own_group(rank, replicas, timeout, _HOST) for _ in range(2))
            copies = own_group(rank, stages, timeout, both) if mesh.replicas > 1 else None
            numbers = own_group(rank, stages, timeout, _HOST) if mesh.replicas > 1 else None
        limit_silence(timeout.total_seconds())
        assert world is not None and pipeline is not None and down is not None and up is not None
        for group in (world, pipeline, copies):
            connect(group, device)
        key = job_key(number)
        for group in (world, pipeline, down, up, copies, numbers):
            prove(group, key)
        made = Groups(
            mesh, rank, device, world, pipeline, down, up, copies, numbers, number, timeout.total_seconds(), key
        )
        made.watch_over(world, pipeline, copies)
        released_with(made, release_groups, [world, pipeline, down, up, copies, numbers])
        return made

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as a `DeviceMesh` with the dimensions "replica" (if there are several) and "stage"."""
        kind = self.device.type
        table = torch.arange(self.mesh.world_size).view(self.mesh.replicas, self.mesh.stages)
        if self.copies is None:
            return DeviceMesh.from_group(self.pipeline, kind, table[0], mesh_dim_names=("stage",))
        return DeviceMesh.from_group([self.copies, self.pipeline], kind, table, mesh_dim_names=("replica", "stage"))

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.mesh.stage_of(self.rank)

    @property
    def replica(self) -> int:
        """The replica of this rank."""
        return self.mesh.replica_of(self.rank)

    @property
    def where(self) -> str:
        """This rank with its place in the mesh, as errors name it."""
        return self.mesh.describe(self.rank)

    def watch_over(self, *groups: dist.ProcessGroup | None) -> None:
        """Let the watcher end the transfers of these groups, too. Groups of CPU jobs notice the loss of a rank themselves."""
        if not computes_on_host(self.device):
            self.watching.groups.extend(group for group in groups if group is not None)

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank that holds `stage` in this replica."""
        return self.mesh.rank(self.replica, stage)

    def channel(self, source: int, target: int) -> dist.ProcessGroup:
        """Return the group for messages in host memory from stage `source` to stage `target`."""
        return self.down if source < target else self.up


def connect(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Make the communicator of a group for tensors on `device`. All members must call it at the same point of set-up."""
    if group is not None and not computes_on_host(device):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


@contextmanager
def unbound() -> Iterator[None]:
    """Make groups inside that are independent of the default group.

    A default group that is bound to a device (`device_id`) would share its communicator with new groups, all ranks would have
    to take part, and all transfers of a group would have one order.
    """
    default: Any = dist.group.WORLD
    device = getattr(default, "bound_device_id", None)
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def own_group(
    rank: int, all_ranks: Iterable[list[int]], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Create one group for each list of ranks and return the one with `rank`, if any. All ranks must call it."""
    found: dist.ProcessGroup | None = None
    for ranks in all_ranks:
        with unbound(), locally():
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
        if rank in ranks:
            found = group
    return found
