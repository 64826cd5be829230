"""Collectives of set-up, in which nobody waits for a rank that has failed.

A process whose set-up has failed may live on (a notebook, a pool of workers) with its connections open: the others would
wait for it until their time is over. So ranks meet in the job's store first, where whoever waits also sees the causes
that others have left, and talk when all of them are there. No operation is ever begun that somebody does not join.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from pipepart.runtime.failure import check_others
from pipepart.runtime.mesh import Groups

__all__ = ["all_reduce", "broadcast_object", "gather_objects", "meet"]

_LOOK = 0.25  # seconds between two looks at the causes that others have left
_LONGEST = 0.01  # seconds between two looks at whether all are there


def meet(groups: Groups, inside_replica: bool = False) -> None:
    """Wait until all ranks, or all stages of this replica, have come here; raise if one of them has failed instead."""
    who = f"replica {groups.replica}" if inside_replica else "all"
    count = groups.mesh.stages if inside_replica else groups.mesh.world_size
    who = f"{groups.number}/{len(groups.failures)}/{who}"  # after a failure of all, they begin to count anew
    groups.meetings[who] += 1
    key = f"pipepart/meeting/{who}/{groups.meetings[who]}"
    store = dist.distributed_c10d._get_default_store()
    if store.add(key, 1) == count:
        store.set(f"{key}/all", "here")
        return
    begun = looked = time.monotonic()
    pause, limit = 0.0002, groups.timeout
    while not store.check([f"{key}/all"]):
        time.sleep(pause)
        pause, now = min(2 * pause, _LONGEST), time.monotonic()
        if now - looked > _LOOK:
            check_others(groups)
            looked = now
        if now - begun > limit:
            raise TimeoutError(f"Timed out waiting {limit:.0f} s for the others to come to the same point of set-up")


def all_reduce(tensor: torch.Tensor, groups: Groups, op: Any = dist.ReduceOp.SUM) -> None:
    """The sum (or another reduction) over all ranks, in place."""
    meet(groups)
    dist.all_reduce(tensor, op)


def broadcast_object(value: Any, source: int, groups: Groups, inside_replica: bool = False) -> Any:
    """An object of the rank `source` on all ranks, or in its replica; what the others pass is not looked at."""
    meet(groups, inside_replica)
    box = [value]
    dist.broadcast_object_list(box, source, group=groups.pipeline if inside_replica else None)
    return value if groups.rank == source else box[0]


def gather_objects(value: Any, groups: Groups, inside_replica: bool = False) -> list[Any]:
    """The objects of all ranks, or of all stages of this replica, in their order, on each of them."""
    meet(groups, inside_replica)
    found: list[Any] = [None] * (groups.mesh.stages if inside_replica else groups.mesh.world_size)
    dist.all_gather_object(found, value, group=groups.pipeline if inside_replica else None)
    return found
