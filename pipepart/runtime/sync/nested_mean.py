"""The mode `mean` in two levels: replicas of a group add up their gradients, then the first ones of all groups do.

```
group 0:  replica 0 <--+-- replica 1         inside: add up at the first one
              |
group 1:  replica 2 <--+-- replica 3
          replica 0 <-----> replica 2        between: the first ones exchange sums
          replica 0 --> 1,  2 --> 3          inside: the first one sends the result
```

Where the links inside a group (a node) are much faster than those between groups, only one replica of each group uses the
slow ones. A rank starts the next part of an exchange when the part before has ended, in the order of the buckets, which is the
same on all ranks; each kind of part has a process group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pipepart.devices import backend_for
from pipepart.runtime.mesh import Groups, connect, own_group
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.runtime.sync.buckets import Bucket, BucketedSync, as_real

__all__ = ["Levels", "NestedMean"]


@dataclass(frozen=True)
class Levels:
    """The process groups of two levels for one stage."""

    up: dist.ProcessGroup
    """The replicas of the group of this rank, for sums."""
    down: dist.ProcessGroup
    """The same replicas, for results."""
    between: dist.ProcessGroup | None
    """The first replicas of all groups; None on the others."""
    first: int
    """The rank of the first replica of the group of this rank."""

    @staticmethod
    def create(groups: Groups, size: int) -> Levels:
        """Create the groups for all stages. All ranks must call it together."""
        mesh, limit, backend = groups.mesh, timedelta(seconds=groups.timeout), backend_for(groups.device)
        starts = range(0, mesh.replicas, size)
        inside = [
            [mesh.rank(start + offset, stage) for offset in range(size)]
            for stage in range(mesh.stages)
            for start in starts
        ]
        firsts = [[mesh.rank(start, stage) for start in starts] for stage in range(mesh.stages)]
        with closed_to_strangers():
            up, down = (own_group(groups.rank, inside, limit, backend) for _ in range(2))
            between = own_group(groups.rank, firsts, limit, backend)
        assert up is not None and down is not None
        for group in (up, down, between):
            connect(group, groups.device)
        groups.watch_over(up, down, between)
        return Levels(up, down, between, mesh.rank(groups.replica // size * size, groups.stage))

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.up, self.down, self.between) if group is not None]


class NestedMean(BucketedSync):
    """Averages the gradients of one stage over its copies in all replicas, inside groups of replicas first."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: int,
        uses: Mapping[str, Sequence[int]],
        late: set[str],
        compress: torch.dtype | None = None,
        *,
        levels: Levels,
    ) -> None:
        super().__init__(group, replicas, uses, late, compress)
        self.levels, self.own_groups = levels, levels.groups
        self._up: list[Bucket] = []
        """Buckets that this rank, as the first of its group, has not yet exchanged between groups, in order."""
        self._between: list[Bucket] = []
        """Those that are under way between groups."""

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().begin(parameters)
        self._up, self._between = [], []

    def start(self, bucket: Bucket) -> dist.Work | None:
        levels = self.levels
        assert bucket.flat is not None
        work: dist.Work | None = dist.reduce(as_real(bucket.flat), levels.first, group=levels.up, async_op=True)
        if levels.between is not None:
            bucket.work = work
            self._up.append(bucket)
            self._advance()
            return bucket.work
        bucket.before, bucket.result = work, torch.empty_like(bucket.flat)
        received: dist.Work | None = dist.broadcast(
            as_real(bucket.result), levels.first, group=levels.down, async_op=True
        )
        return received

    def _advance(self, until: Bucket | None = None) -> None:
        """Start the next parts of exchanges whose part before has ended; with `until`, wait for those up to this bucket."""
        levels, waits = self.levels, until in self._up
        while self._up and (waits or _ended(self._up[0])):
            bucket = self._up.pop(0)
            _finish(bucket)
            assert bucket.flat is not None
            bucket.work = dist.all_reduce(bucket.flat, group=levels.between, async_op=True)
            self._between.append(bucket)
            waits = waits and bucket is not until
        waits = until in self._between
        while self._between and (waits or _ended(self._between[0])):
            bucket = self._between.pop(0)
            _finish(bucket)
            assert bucket.flat is not None
            bucket.work = dist.broadcast(as_real(bucket.flat), levels.first, group=levels.down, async_op=True)
            waits = waits and bucket is not until

    def wait(self, bucket: Bucket) -> None:
        if self.levels.between is not None:
            self._advance(until=bucket)
            _finish(bucket)
            return
        _finish(bucket)
        assert bucket.before is not None
        bucket.before.wait()
        bucket.flat, bucket.before, bucket.result = bucket.result, None, None

    def end(self, bucket: Bucket) -> None:
        self.unpack(bucket)


def _ended(bucket: Bucket) -> bool:
    return bucket.work is not None and bucket.work.is_completed()


def _finish(bucket: Bucket) -> None:
    assert bucket.work is not None
    bucket.work.wait()
