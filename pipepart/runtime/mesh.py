"""Which rank does what: replicas x stages, and the process groups between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipepart.errors import PlanError
from pipepart.runtime.leaving import release_groups, released_with

__all__ = ["Groups", "Mesh", "fit_mesh"]


@dataclass(frozen=True)
class Mesh:
    """Ranks as a table: ``rank = replica * stages + stage``, so that the stages of a replica are neighbours.

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
        """The ranks of one whole pipeline, first stage first."""
        return [self.rank(replica, stage) for stage in range(self.stages)]

    def copies(self, stage: int) -> list[int]:
        """The ranks that hold the same stage in every replica."""
        return [self.rank(replica, stage) for replica in range(self.replicas)]


def fit_mesh(devices: int, stages: int | str = "auto", replicas: int | str = "auto") -> Mesh:
    """The mesh for `devices` processes; what is ``"auto"`` follows from the rest (all devices in one pipeline first)."""
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
    """The process groups that this rank talks in. Made once; every rank of the world takes part in making all of them."""

    mesh: Mesh
    rank: int
    pipeline: dist.ProcessGroup
    """All stages of this replica: step headers and results."""
    down: dist.ProcessGroup
    """Messages from lower to higher stages. Apart from `up`, so that each channel has one direction and one order
    (NCCL needs that), and apart from the world group, which Lightning uses on its own."""
    up: dist.ProcessGroup
    copies: dist.ProcessGroup | None
    """The same stage in every replica: gradients."""
    numbers: dist.ProcessGroup | None = None
    """The same stage in every replica: plain numbers, in host memory."""
    number: int = 0
    """Which groups of the job these are: 1 for those that were made first."""
    timeout: float = 300.0
    """Seconds that ranks wait for each other."""
    failures: list[str] = field(default_factory=list, compare=False)
    """What this rank has failed with in these groups."""
    meetings: Counter[str] = field(default_factory=Counter, compare=False)
    """How often this rank has met others, by who they are."""

    @staticmethod
    def create(mesh: Mesh, timeout: timedelta) -> Groups:
        rank = dist.get_rank()
        number = int(dist.distributed_c10d._get_default_store().add(f"pipepart/groups/{rank}", 1))
        mine: dict[str, dist.ProcessGroup] = {}
        for name in ("pipeline", "down", "up"):
            for replica in range(mesh.replicas):
                ranks = mesh.pipeline(replica)
                group = dist.new_group(ranks, timeout=timeout)
                if rank in ranks:
                    mine[name] = group
        copies = (
            _own(rank, [mesh.copies(stage) for stage in range(mesh.stages)], timeout) if mesh.replicas > 1 else None
        )
        stages = [mesh.copies(stage) for stage in range(mesh.stages)]
        numbers = _own(rank, stages, timeout, "gloo") if mesh.replicas > 1 else None
        made = Groups(
            mesh, rank, mine["pipeline"], mine["down"], mine["up"], copies, numbers, number, timeout.total_seconds()
        )
        released_with(made, release_groups, [*mine.values(), copies, numbers])
        return made

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The same table as a `DeviceMesh` with the dimensions "replica" (if there are several) and "stage"."""
        kind = "cuda" if dist.get_backend(self.pipeline) == "nccl" else "cpu"
        table = torch.arange(self.mesh.world_size).view(self.mesh.replicas, self.mesh.stages)
        if self.copies is None:
            return DeviceMesh.from_group(self.pipeline, kind, table[0], mesh_dim_names=("stage",))
        return DeviceMesh.from_group([self.copies, self.pipeline], kind, table, mesh_dim_names=("replica", "stage"))

    @property
    def stage(self) -> int:
        return self.mesh.stage_of(self.rank)

    @property
    def replica(self) -> int:
        return self.mesh.replica_of(self.rank)

    def rank_of_stage(self, stage: int) -> int:
        """The global rank that holds `stage` in this replica."""
        return self.mesh.rank(self.replica, stage)

    def channel(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages from stage `source` to stage `target`."""
        return self.down if source < target else self.up


def _own(
    rank: int, all_ranks: Iterable[list[int]], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Make one group for each list of ranks (all ranks must do that together) and return the one with `rank` in it."""
    found: dist.ProcessGroup | None = None
    for ranks in all_ranks:
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        if rank in ranks:
            found = group
    assert found is not None, f"rank {rank} is in no group"
    return found
