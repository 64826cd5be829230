"""The devices of a job that runs on accelerators: the memory that each stage may use, and the links between ranks.

All ranks collect the same facts. A stage may use what the smallest of its devices offers, over all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipepart.build.job import Job
from pipepart.build.links import OwnLinks, joined_links, measure_links
from pipepart.cost.device_memory import Room, room_of
from pipepart.devices import computes_on_host
from pipepart.planning.layout import BETWEEN_GPUS, BY_PROCESSOR, GROUP_LINK, LOCAL_LINK, Handling, MeasuredLinks
from pipepart.runtime import Mesh
from pipepart.runtime.meeting import gather_objects

__all__ = ["JobDevices", "devices_of_job", "joined_rooms"]


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
