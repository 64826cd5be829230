"""Collectives of set-up, in which no rank waits for a rank that has failed.

A process whose set-up has failed may stay alive with open connections (a notebook, a pool of workers), and the other ranks
would wait for it until their timeout. So ranks meet in the store of the job first, where a rank that waits also sees the
failures of others, and start the collective when all of them are there. Flags and numbers of steps need no such
meeting: a rank looks for failures while it waits for those of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipepart.parent import check_rank_0
from pipepart.runtime.failure import check_others
from pipepart.runtime.mesh import Groups
from pipepart.runtime.rendezvous import job_store
from pipepart.runtime.signing import signed, verified

__all__ = [
    "all_reduce",
    "broadcast_object",
    "exchange_objects",
    "gather_objects",
    "meet",
    "reduce_later",
    "reduce_numbers",
]

_LOOK = 0.25  # seconds between two looks at failures of other ranks
_STILL_WAITING = "Operation timed out!"  # the words of torch if an operation has not ended when its wait has
_LONGEST = 0.01  # seconds between two looks at whether all ranks are there, at most


def meet(groups: Groups, inside_replica: bool = False) -> None:
    """Wait until all ranks, or all stages of this replica, call this function; raise if one of them has failed."""
    members = f"replica {groups.replica}" if inside_replica else "all"
    count = groups.mesh.stages if inside_replica else groups.mesh.world_size
    name = f"{groups.number}/{len(groups.failures)}/{members}"  # after a failure of all ranks, counts start again
    groups.meetings[name] += 1
    key = f"pipepart/meeting/{name}/{groups.meetings[name]}"
    store = job_store()
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
            if not inside_replica or groups.replica == 0:
                check_rank_0()  # the store is a file: it does not tell that a rank is gone
            looked = now
        if now - begun > limit:
            raise TimeoutError(f"Timed out waiting {limit:.0f} s for the other ranks to reach the same point of set-up")


def all_reduce(tensor: torch.Tensor, groups: Groups, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce a tensor over all ranks, in place."""
    meet(groups)
    dist.all_reduce(tensor, op, group=groups.world)


def reduce_numbers(
    numbers: torch.Tensor, groups: Groups, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.MAX
) -> None:
    """Reduce numbers in host memory over one of the groups, in place, without a meeting in the store."""
    reduce_later(numbers, groups, group, op)()


def reduce_later(
    numbers: torch.Tensor, groups: Groups, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.MAX
) -> Callable[[], None]:
    """Start what `reduce_numbers` does, and return the function that waits for its end."""
    return _waiting(dist.all_reduce(numbers, op, group=group, async_op=True), groups)


def _waiting(work: dist.Work | None, groups: Groups) -> Callable[[], None]:
    assert work is not None

    def wait() -> None:
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK))
                return
            except RuntimeError as error:
                if _STILL_WAITING not in str(error):
                    raise
            check_others(groups)

    return wait


def broadcast_object(value: Any, source: int, groups: Groups, inside_replica: bool = False) -> Any:
    """Return the object of rank `source` on all ranks, or on all stages of its replica; other ranks' values are ignored."""
    meet(groups, inside_replica)
    group = groups.pipeline if inside_replica else groups.world
    sends = groups.rank == source
    data = _bytes(signed(value, groups)) if sends else None
    size = torch.tensor([0 if data is None else len(data)])
    dist.broadcast(size, source, group=group)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, source, group=group)
    return value if sends else verified(data.numpy().tobytes(), groups)


def gather_objects(value: Any, groups: Groups, inside_replica: bool = False) -> list[Any]:
    """Return the objects of all ranks, or of all stages of this replica, in the order of ranks, on each of them."""
    meet(groups, inside_replica)
    return exchange_objects(value, groups, inside_replica)


def exchange_objects(value: Any, groups: Groups, inside_replica: bool = False, target: int | None = None) -> list[Any]:
    """Gather objects without a meeting in the store. With `target`, only this rank has them, and others an empty list."""
    group = groups.pipeline if inside_replica else groups.world
    count = groups.mesh.stages if inside_replica else groups.mesh.world_size
    data = _bytes(signed(value, groups))
    sizes = torch.empty(count, dtype=torch.int64)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(data)]), group=group)
    lengths = [int(size) for size in sizes]
    data = torch.nn.functional.pad(data, (0, max(lengths) - len(data)))
    gets = target is None or groups.rank == target
    parts = [torch.empty_like(data) for _ in range(count)] if gets else None
    if target is None:
        dist.all_gather(parts, data, group=group)
    else:
        dist.gather(data, parts, target, group=group)
    return [verified(part[:size].numpy().tobytes(), groups) for part, size in zip(parts or [], lengths)]


def _bytes(data: bytes) -> torch.Tensor:
    """Return bytes in host memory, whatever device the job computes on: objects travel over gloo."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
