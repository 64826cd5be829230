"""The devices of a job that runs on accelerators: the memory that each stage may use, and the links between ranks.

All ranks collect the same facts. A stage may use what the smallest of its devices offers, over all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipepart.build.job import Job
from pipepart.build.links import OwnLinks, joined_links, measure_links
from pipepart.cost.device_memory import Room, room_of, whole_fits
from pipepart.devices import computes_on_host, move_module
from pipepart.planning.layout import BETWEEN_GPUS, BY_PROCESSOR, GROUP_LINK, LOCAL_LINK, Handling, MeasuredLinks
from pipepart.runtime import Groups, Mesh
from pipepart.runtime.meeting import gather_objects

__all__ = ["JobDevices", "devices_of_job", "joined_rooms", "place_model", "place_part"]


@dataclass(frozen=True)
class JobDevices:
    """The devices of a job, for the planner."""

    on_host: bool
    """Whether ranks compute on the CPU. Its memory has no limit, and its links are known without a measurement."""
    stage_memory: tuple[float, ...] = ()
    memory_source: str = ""
    links: MeasuredLinks | None = None

    def request(self) -> dict[str, Any]:
        """Return the fields of a `PlanRequest` that describe these devices."""
        return {
            "link": LOCAL_LINK if self.on_host else BETWEEN_GPUS,
            "across": GROUP_LINK if self.on_host else BETWEEN_GPUS,
            "handling": BY_PROCESSOR if self.on_host else Handling(),
            "stage_memory": self.stage_memory,
            "memory_source": self.memory_source,
            "links": self.links,
        }


def devices_of_job(job: Job) -> JobDevices:
    """Collect the facts of all ranks. All ranks must call it; on the CPU it does nothing."""
    if computes_on_host(job.device):
        return JobDevices(True)
    room = room_of(job.device)
    if job.groups is None:
        memory, source = joined_rooms([room], job.mesh)
        return JobDevices(False, memory, source)
    found: list[tuple[Room | None, OwnLinks]] = gather_objects(
        (room, measure_links(job.groups, job.device)), job.groups
    )
    memory, source = joined_rooms([room for room, _ in found], job.mesh)
    return JobDevices(False, memory, source, joined_links([links for _, links in found], job.mesh))


def joined_rooms(rooms: Sequence[Room | None], mesh: Mesh) -> tuple[tuple[float, ...], str]:
    """Return the bytes of each stage, and a description of the least; both are empty if no device tells its memory."""
    if all(room is None for room in rooms):
        return (), ""
    of_rank = [math.inf if room is None else float(room.bytes) for room in rooms]
    least = min(range(len(rooms)), key=of_rank.__getitem__)
    where = f" on rank {least}" if mesh.world_size > 1 else ""
    return tuple(min(of_rank[r] for r in mesh.copies(stage)) for stage in range(mesh.stages)), f"{rooms[least]}{where}"


def place_model(root: nn.Module, device: torch.device, groups: Groups | None) -> bool:
    """Move a model to the device of this rank before it is recorded, and return True.

    If it does not fit on the device of some rank, it stays where it is on all ranks, and the result is False: it is then
    recorded from shapes, measured op by op, and `place_part` moves what this rank keeps. All ranks must call it.
    """
    fits = whole_fits(root, device)
    if groups is not None and not computes_on_host(device):
        fits = all(gather_objects(fits, groups))
    if fits:
        place_part(root, device)
    return fits


def place_part(root: nn.Module, device: torch.device) -> None:
    """Move the tensors of a model that have values. Those on the meta device, and of other stages, stay as they are."""
    move_module(root, device)
