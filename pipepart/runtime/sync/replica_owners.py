"""The modes `sharded` and `master`: each parameter is updated by one replica, its owner, which alone has its optimizer state.

```
backward     gradients of a bucket are final --reduce--> owner        the others let go of them
update       owner: optimizer.step()                                  the others skip it: `.grad` is None
after it     owner --broadcast--> all replicas
```

Both modes are this mechanism with another placement: owners share the parameters of a stage evenly, or one has them all.
An optimizer of torch skips parameters without a gradient, with their weight decay and momentum, and makes no state for them.
So every optimizer that has its states by parameter works as it is. Owners have whole parameters: an optimizer may look at the
shape of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipepart.errors import PipelineError
from pipepart.runtime.sync.buckets import Bucket, BucketedSync, as_real, buckets_of
from pipepart.runtime.sync.parcels import Parcel, parcels_of

__all__ = ["ReplicaOwners", "balanced_owners"]

_UNDER_WAY = 4
"""Buckets of parameters that travel at once."""


def balanced_owners(sizes: Mapping[str, int], replicas: int, trained: Collection[str]) -> dict[str, int]:
    """Return the owner of each parameter: the largest first, each to the replica that has least.

    Parameters that are trained come before the others, so that their states are even also if most parameters are frozen.
    The answer depends on the arguments alone, so all replicas find the same.
    """
    load = [0] * replicas
    owners = {}
    for name in sorted(sizes, key=lambda name: (name not in trained, -sizes[name])):
        owners[name] = min(range(replicas), key=load.__getitem__)
        load[owners[name]] += sizes[name]
    return owners


class ReplicaOwners(BucketedSync):
    """Brings gradients to the owners of their parameters, and updated parameters from there to all replicas."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: int,
        uses: Mapping[str, Sequence[int]],
        late: set[str],
        compress: torch.dtype | None = None,
        *,
        owners: Mapping[str, int],
        named: Callable[[], Mapping[str, nn.Parameter]],
    ) -> None:
        """`owners`: the replica that updates each parameter of this stage, by name; `named` returns these parameters."""
        super().__init__(group, replicas, uses, late, compress)
        self.replica = dist.get_rank(group)
        self.owners, self._named = dict(owners), named
        self._ranks = [dist.get_global_rank(group, replica) for replica in range(replicas)]
        self._name_of: dict[int, str] = {}
        self._versions: dict[str, int] = {}
        """The version of each parameter when it was equal on all replicas."""
        self._changed: set[int] = set()
        """The buckets of this step with a parameter that was changed since then, by identity."""

    def elsewhere(self) -> set[int]:
        """Return the parameters of this stage that other replicas update, by identity."""
        return {id(p) for name, p in self._named().items() if self.owners[name] != self.replica}

    # ---- gradients

    def divided(self, order: Sequence[tuple[str, nn.Parameter]]) -> list[Bucket]:
        self._name_of = {id(p): name for name, p in order}
        for name, parameter in order:
            self._versions.setdefault(name, parameter._version)
        return buckets_of([(p, self.owners[name]) for name, p in order])

    def flags(self, bucket: Bucket) -> list[torch.Tensor]:
        """Tell the owner whether parameters have changed here since replicas were equal; see `_check`."""
        first = bucket.parameters[0]
        changed = any(self._has_changed(p) for p in bucket.parameters)
        (self._changed.add if changed else self._changed.discard)(id(bucket))
        return [torch.full((1,), float(changed), dtype=first.dtype, device=first.device)]

    def _has_changed(self, parameter: nn.Parameter) -> bool:
        return parameter._version != self._versions[self._name_of[id(parameter)]]

    def start(self, bucket: Bucket) -> dist.Work | None:
        assert bucket.flat is not None
        work: dist.Work | None = dist.reduce(
            as_real(bucket.flat), self._ranks[bucket.owner], group=self.group, async_op=True
        )
        for parameter in bucket.parameters:  # the vector has it
            parameter.grad = None
        self._release()
        return work

    def _release(self) -> None:
        """Let go of vectors that have arrived at other replicas."""
        for bucket in self._buckets[: self._next]:
            sent = bucket.work is not None and bucket.work.is_completed()
            if sent and bucket.owner != self.replica and bucket.flat is not None:
                bucket.flat = bucket.flat.new_empty(0)

    def end(self, bucket: Bucket) -> None:
        if bucket.owner == self.replica:
            self._check(bucket)
            self.unpack(bucket)

    def _check(self, bucket: Bucket) -> None:
        """Refuse an update that only the owner has made: the other replicas would go on with old parameters."""
        if id(bucket) not in self._changed or bucket.flat is None:
            return
        if round(float(bucket.flat[-1].real) * self.replicas) == 1:
            first = next(p for p in bucket.parameters if self._has_changed(p))
            raise PipelineError(
                f"parameter {self._name_of[id(first)]!r} was changed on replica {self.replica} alone, which updates it, and "
                "was not sent to the other replicas. Parameters are sent after the step of a torch.optim.Optimizer. Use "
                "one, change parameters on all replicas alike, or use sync='mean'."
            )

    # ---- parameters

    @torch.no_grad()
    def send_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Send those of `parameters` that this stage has trained from their owners to all replicas, which all must call it."""
        wanted = {id(p) for p in parameters}
        chosen = {name: p for name, p in self._named().items() if id(p) in wanted and name in self._versions}
        self._spread([(p.data, self.owners[name]) for name, p in chosen.items()])
        self._versions.update({name: p._version for name, p in chosen.items()})

    @torch.no_grad()
    def show_gradients(self) -> None:
        """Give every replica the gradients that owners have, until `hide_gradients`. All replicas must call it."""
        named = self._named()
        if not named:
            return
        exists = torch.tensor(
            [p.grad is not None and self.owners[name] == self.replica for name, p in named.items()], dtype=torch.uint8
        ).to(next(iter(named.values())).device)
        dist.all_reduce(exists, dist.ReduceOp.MAX, group=self.group)
        shown = []
        for (name, parameter), has in zip(named.items(), exists.tolist()):
            if has and self.owners[name] != self.replica:
                parameter.grad = torch.empty_like(parameter)
            if has and parameter.grad is not None:
                shown.append((parameter.grad, self.owners[name]))
        self._spread(shown)

    def hide_gradients(self) -> None:
        """Let go of the gradients of parameters that other replicas update."""
        for name, parameter in self._named().items():
            if self.owners[name] != self.replica:
                parameter.grad = None

    def _spread(self, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Copy each tensor from its owner to all replicas, in place."""
        under_way: deque[Parcel] = deque()
        for parcel in parcels_of(tensors):
            if len(under_way) == _UNDER_WAY:
                under_way.popleft().arrive()
            parcel.send(self._ranks[parcel.owner], self.group, parcel.owner == self.replica)
            under_way.append(parcel)
        for parcel in under_way:
            parcel.arrive()
