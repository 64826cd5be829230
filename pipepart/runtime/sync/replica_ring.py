"""The mode `ring`: a token with the newest parameters goes around the replicas. Each adds its own update and does not wait.

```
token      -> replica 0 -> replica 1 -> replica 2 -> replica 0 ...
replica r  update, update, token is there: token += own updates / replicas, parameters = token, pass it on, update ...
```

A replica looks for the token after each of its updates, and goes on with the parameters that it has if the token is elsewhere.
When it comes, it has the updates of all other replicas of one round: the parameters that a replica computes with are never
older than that. A replica whose token is late makes at most `staleness` x replicas updates with them, and waits then.

Updates are divided by the number of replicas, so that a round of one update each is the mean of them, as with `mean`. The
stages of a replica decide together whether the token is there, so all of them hold parameters of the same time, and copies of
tied parameters stay equal. Where all replicas must have equal parameters (an evaluation, a checkpoint, the end), the ring
*settles*: the token and all updates that it does not have yet are added up, and every replica goes on with the sum.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.devices import backend_for
from pipepart.errors import PipelineError
from pipepart.runtime.failure import check_others
from pipepart.runtime.meeting import reduce_numbers
from pipepart.runtime.mesh import Groups, connect, own_group
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.runtime.sync.buckets import as_real
from pipepart.runtime.sync.loose import LooseReplicas
from pipepart.runtime.sync.replica_sums import vectors

__all__ = ["ReplicaRing"]

_HOST = "gloo"
_PAUSE = 0.002
"""Seconds between two looks for the token."""
_LOOK = 100
"""Looks for the token between two looks at failures of other ranks."""


class _Link:
    """The way of the token between two neighbours: one message after the other, in vectors."""

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        """`source`: the rank that sends."""
        self.group, self._source = group, source
        self._under_way: list[tuple[torch.Tensor, dist.Work | None]] = []

    @property
    def busy(self) -> bool:
        """Whether a message was started whose end nobody has waited for."""
        return bool(self._under_way)

    @property
    def ended(self) -> bool:
        """Whether the message that was started has arrived."""
        return all(work is not None and work.is_completed() for _, work in self._under_way)

    def start(self, content: list[torch.Tensor]) -> None:
        """Start to send `content`, or to receive into it."""
        self._under_way = [
            (flat, dist.broadcast(as_real(flat), self._source, group=self.group, async_op=True)) for flat in content
        ]

    def wait(self) -> list[torch.Tensor]:
        """Wait for the message, and return it."""
        content, self._under_way = self._under_way, []
        for _, work in content:
            assert work is not None
            work.wait()
        return [flat for flat, _ in content]


class ReplicaRing(LooseReplicas):
    """The copies of one stage, between which the token goes around."""

    mode = "ring"

    def __init__(
        self,
        groups: Groups,
        named: Callable[..., Mapping[str, nn.Parameter]],
        staleness: int,
        tied: Collection[str] = (),
    ) -> None:
        """All ranks must call it together. `staleness`: the rounds that the parameters of an update may be old."""
        assert groups.copies is not None
        super().__init__(groups.copies, groups.mesh.replicas, named, tied)
        self._groups, self._replica = groups, groups.replica
        self.most = staleness * self.replicas
        """The updates that a replica makes between two visits of the token, at most."""
        self.seen: Counter[int] = Counter()
        """For each number of updates between two visits of the token, how often it was seen."""
        self._pauses = 0
        self.waited = 0.0
        """The seconds of this rank in which it waited for the token."""
        self._connect(groups)
        self._layout: list[list[int]] = []
        self._base: dict[str, torch.Tensor] = {}
        """The parameters when the token was here last; empty after the ring has settled."""
        self._updates = 0
        """The updates since then."""
        self._visits = 0
        """How often the token was here since the ring has settled."""

    def _connect(self, groups: Groups) -> None:
        mesh, limit, backend = groups.mesh, timedelta(seconds=groups.timeout), backend_for(groups.device)
        count, links = mesh.replicas, {}
        with closed_to_strangers():
            for replica in range(count):
                pairs = [
                    (mesh.copies(stage)[replica], mesh.copies(stage)[(replica + 1) % count])
                    for stage in range(mesh.stages)
                ]
                group = own_group(groups.rank, [sorted(pair) for pair in pairs], limit, backend)
                if group is not None:
                    links[replica] = _Link(group, pairs[groups.stage][0])
            self._flags = own_group(groups.rank, [mesh.pipeline(r) for r in range(count)], limit, _HOST)
            self._barrier = own_group(groups.rank, [mesh.copies(s) for s in range(mesh.stages)], limit, _HOST)
        assert self._flags is not None and self._barrier is not None
        self.own_groups += [self._flags, self._barrier]
        for link in links.values():
            connect(link.group, groups.device)
            groups.watch_over(link.group)
            self.own_groups.append(link.group)
        self._right, self._left = links[self._replica], links[(self._replica - 1) % count]

    @property
    def staleness(self) -> Mapping[int, int]:
        return dict(self.seen)

    @property
    def in_step(self) -> bool:
        return not self._updates and not self._visits

    # ---- updates

    @torch.no_grad()
    def before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        if self.in_step:
            own = self.trained()
            self._base = {name: p.detach().clone() for name, p in own.items()}
            self._layout = list(vectors(list(own.values())))

    @torch.no_grad()
    def after_update(self, parameters: Iterable[torch.Tensor]) -> None:
        own = self._own()
        self._updates += 1
        self._expect(own)
        if not self._agreed(self._is_here)[0]:
            if self._updates < self.most:
                return
            begun = time.perf_counter()
            while not self._agreed(self._is_here)[0]:
                self._pause()
            self.waited += time.perf_counter() - begun
        self._serve(own)

    def _own(self) -> dict[str, nn.Parameter]:
        own = self.trained()
        if own.keys() != self._base.keys():
            differing = sorted(own.keys() ^ self._base.keys())
            raise PipelineError(
                f"parameter {differing[0]!r} was frozen or unfrozen while the token goes around (sync='ring'), and "
                "the others do not know it. Freeze parameters before the first step, or use sync='mean'."
            )
        return own

    @property
    def _is_here(self) -> bool:
        """Whether the token is here. The first visit is that of replica 0, which all replicas know.

        A stage that trains nothing has no part of the token, and goes with the other stages.
        """
        if not self._layout:
            return True
        return self._left.ended if self._left.busy else not self._visits and not self._replica

    def _expect(self, own: Mapping[str, nn.Parameter]) -> None:
        """Receive the token whenever it comes. Replica 0 has it at first."""
        if not self._left.busy and (self._visits or self._replica):
            values = list(own.values())
            self._left.start([values[p[0]].new_empty(sum(values[i].numel() for i in p)) for p in self._layout])

    def _serve(self, own: Mapping[str, nn.Parameter]) -> None:
        """Add the updates of this replica to the token, take its parameters and pass it on."""
        names, values = list(own), list(own.values())
        token = self._left.wait() if self._left.busy else None
        sent = []
        if self._right.busy:
            self._right.wait()
        for number, places in enumerate(self._layout):
            parts = (
                token[number].split([values[i].numel() for i in places]) if token is not None else [None] * len(places)
            )
            for place, part in zip(places, parts):
                base, parameter = self._base[names[place]], values[place]
                update = (parameter - base).div_(self.replicas)
                base.copy_(update.add_(base if part is None else part.view(base.shape)))
                parameter.copy_(base)
            sent.append(torch.cat([values[i].detach().reshape(-1) for i in places]))
        self._right.start(sent)
        self.seen[self._updates] += 1
        self._updates, self._visits = 0, self._visits + 1
        self._expect(own)

    def _pause(self) -> None:
        time.sleep(_PAUSE)
        self._pauses += 1
        if not self._pauses % _LOOK:
            check_others(self._groups)

    def _agreed(self, *flags: bool) -> list[bool]:
        """Return whether each flag is set on all stages of this replica."""
        if self._groups.mesh.stages == 1:
            return list(flags)
        numbers = torch.tensor([int(flag) for flag in flags])
        reduce_numbers(numbers, self._groups, self._flags, dist.ReduceOp.MIN)
        return [bool(flag) for flag in numbers]

    # ---- one set of parameters

    @torch.no_grad()
    def show_mean(self) -> None:
        """Let the ring settle: its parameters are then equal on all replicas. All replicas must call it."""
        if self.in_step:
            return
        own = self._own()
        self._wait_for_all(own)
        visits = torch.zeros(self.replicas, dtype=torch.int64)
        visits[self._replica] = self._visits
        dist.all_reduce(visits, group=self._barrier)
        holder = int(visits.sum()) % self.replicas
        if self._right.busy:
            self._right.wait()
        if (self._replica + 1) % self.replicas != holder:  # the right neighbour, too, waits for a message
            values = list(own.values())
            self._right.start([values[p[0]].new_zeros(sum(values[i].numel() for i in p)) for p in self._layout])
        received = self._left.wait()
        if self._right.busy:
            self._right.wait()
        self._add_up(own, received if self._replica == holder else None)
        self._base = {name: p.detach().clone() for name, p in own.items()}  # an update may have been announced already
        self._updates = self._visits = 0

    def _wait_for_all(self, own: Mapping[str, nn.Parameter]) -> None:
        """Serve the token until all replicas are here: some may need it to get here."""
        all_here = dist.all_reduce(torch.zeros(1), group=self._barrier, async_op=True)
        assert all_here is not None
        while True:
            here, ended = self._agreed(self._is_here, all_here.is_completed())
            if ended:
                break
            if here:
                self._serve(own)
            else:
                self._pause()
        all_here.wait()

    def _add_up(self, own: Mapping[str, nn.Parameter], token: list[torch.Tensor] | None) -> None:
        names, values = list(own), list(own.values())
        terms = {name: (p - self._base[name]).div_(self.replicas) for name, p in own.items()}
        for number, places in enumerate(self._layout if token is not None else ()):
            for place, part in zip(places, token[number].split([values[i].numel() for i in places])):  # type: ignore[index]
                terms[names[place]].add_(part.view(values[place].shape))
        for name, total in self._summed(terms):
            own[name].copy_(total)

    def hide_mean(self) -> None:
        """Do nothing: all replicas go on with equal parameters."""

    def average(self) -> None:
        self.show_mean()

    def settle(self) -> None:
        """Let the ring settle: a replica that waits elsewhere does not pass the token on, and others may wait for it."""
        self.show_mean()

    def begin_anew(self) -> None:
        """Forget the last round. No token may be under way."""
        self._base, self._layout, self._updates, self._visits = {}, [], 0, 0

    @property
    def summary(self) -> str:
        if not self.seen:
            return ""
        visits = sum(self.seen.values())
        mean = sum(updates * count for updates, count in self.seen.items()) / visits
        return (
            f"ring       {visits} visits of the token, after {min(self.seen)} to {max(self.seen)} updates ({mean:.1f} on "
            f"average, at most {self.most}); waited {self.waited:.1f} s for it"
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a ring that has settled has no state."""
