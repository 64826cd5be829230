"""Gradients of a stage: sums over tied parameters, exchange with replicas, weights of accumulated batches, norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pipepart.devices import backend_for
from pipepart.planning.sync_mode import SyncMode
from pipepart.runtime.mesh import Groups, connect, own_group
from pipepart.runtime.parts import Ownership
from pipepart.runtime.strangers import closed_to_strangers
from pipepart.runtime.sync import (
    BorrowedParameters,
    BucketedSync,
    LooseReplicas,
    ReplicaOwners,
    ReplicaShares,
    loose_replicas,
    neighbours,
    replica_sync,
)
from pipepart.runtime.tracing import Trace
from pipepart.schedule import Action

__all__ = ["Accumulation", "GradientSync", "clip_grad_norm", "gradient_norm"]

_ROUNDING = 1e-12


class GradientSync:
    """The collectives on gradients of one stage. All ranks create it together."""

    def __init__(
        self,
        ownership: Ownership,
        groups: Groups | None,
        mode: SyncMode,
        named: Callable[..., Mapping[str, nn.Parameter]],
    ) -> None:
        """`named` returns the parameters of this stage by name, or with True those of all stages."""
        self.replicas: BucketedSync | None = None
        """The exchange with the other replicas; None with one replica."""
        self.loose: LooseReplicas | None = None
        """The exchange of parameters between replicas that make updates of their own; None in other modes."""
        self.numbers: dist.ProcessGroup | None = None
        """The same stage in the replicas whose gradients are combined, for plain numbers; None: there are no others."""
        self._tied: dict[str, dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []
        self._first_chunk = 0
        if groups is None:
            return
        uses = ownership.uses(groups.stage)
        self._first_chunk = min((chunk for chunks in uses.values() for chunk in chunks), default=0)
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, stages in ownership.tied.items():
            if stages not in made:
                ranks = [[groups.mesh.rank(r, stage) for stage in stages] for r in range(groups.mesh.replicas)]
                with closed_to_strangers():
                    both = backend_for(groups.device)
                    made[stages] = own_group(groups.rank, ranks, timedelta(seconds=groups.timeout), both)
                connect(made[stages], groups.device)
                groups.watch_over(made[stages])
            own = made[stages]
            if own is not None:
                self._tied[name] = own
        self.replicas = replica_sync(mode, ownership, groups, set(self._tied), named)
        self.loose = loose_replicas(mode, groups, set(self._tied), named)
        if self.loose is None:
            self.numbers = groups.numbers
        elif mode.size is not None:
            self.numbers = neighbours(groups, mode.size, "gloo")
            self._made = [self.numbers]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that were made for the gradients of this rank."""
        made = [part.own_groups for part in (self.replicas, self.loose) if part is not None]
        return [*self._made, *self._tied.values(), *(group for groups in made for group in groups)]

    @property
    def owners(self) -> ReplicaOwners | None:
        """The owners of parameters, in modes in which one replica updates each of them."""
        return self.replicas if isinstance(self.replicas, ReplicaOwners) else None

    @property
    def borrowed(self) -> BorrowedParameters | None:
        """The parameters that replicas borrow from each other; None in modes in which each has all of its stage."""
        return self.replicas.borrowed if isinstance(self.replicas, ReplicaShares) else None

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start a step whose gradients are reduced."""
        if self.replicas is not None:
            self.replicas.begin(parameters)

    def reduce(self, parameters: Mapping[str, nn.Parameter], trace: Trace | None = None) -> None:
        """Make the new gradients in `.grad` final: sum over tied copies, then mean over replicas."""
        if not self._tied and self.replicas is None:
            return
        started = trace.now() if trace is not None else None
        for name, group in self._tied.items():
            parameter = parameters[name]
            if parameter.requires_grad:
                if parameter.grad is None:  # no gradient reached this copy, and the other stages wait for its share
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        if self.replicas is not None:
            self.replicas.finish()
        if trace is not None:
            trace.add(Action("REDUCE", self._first_chunk, 0), started)


class Accumulation:
    """The weights of batches whose gradients are added for one step of the optimizer.

    One process on all of these batches at once divides by the sum of their denominators (tokens, samples). That sum is
    unknown while the first batch runs, so earlier gradients are rescaled when the next batch comes.
    """

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0
        self._equal = False

    @property
    def denominator(self) -> float | None:
        """The denominator of the loss over all batches so far; None if it has several, or is divided already."""
        return None if self._equal else self._total

    def add(self, denominator: float | None, continues: bool, batches: int | None = None) -> tuple[float, float]:
        """Return the factors of the earlier gradients and of those of the next batch.

        After k batches with denominators D, batch i has the weight ``k D_i / sum(D)``, which is 1 if all are equal. A
        `denominator` of None: the loss has several, and all batches of the step have equal weights. `batches`: the loss is
        divided by the denominators of so many batches together already, and is multiplied by their number.
        """
        if not continues:
            self._count, self._total, self._equal = 0, 0.0, False
        if batches is not None:
            self._equal = True
            return 1.0, float(batches)
        count, total = self._count, self._total
        self._count += 1
        self._equal = self._equal or denominator is None
        if self._equal or denominator is None:
            return 1.0, 1.0
        self._total = total + denominator
        if not count or not self._total:
            return 1.0, 1.0
        kept = (
            self._count / count * total / self._total if total else 1.0
        )  # without targets, earlier gradients are zero
        return _rounded(kept), _rounded(self._count * denominator / self._total)


def _rounded(factor: float) -> float:
    return 1.0 if abs(factor - 1.0) < _ROUNDING else factor


@torch.no_grad()
def gradient_norm(
    counted: Sequence[nn.Parameter], over: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Return the 2-norm of all gradients of the model, in float64.

    `counted`: the parameters that this rank contributes, each of them on one rank of the group `over` only; it may be empty.
    Without a group this rank has all gradients.
    """
    gradients = [_countable(p.grad) for p in counted if p.grad is not None]
    if gradients:
        norm = nn.utils.get_total_norm(gradients).to(device, torch.float64)
    else:
        norm = torch.zeros((), device=device, dtype=torch.float64)
    if over is None:
        return norm
    square = norm.square()
    dist.all_reduce(square, group=over)
    return square.sqrt()


def _countable(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor of the same norm, in a dtype in which `get_total_norm` is exact."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.dtype in (torch.float16, torch.bfloat16):  # their own norms would be rounded to 16 bits
        return torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return gradient


def clip_grad_norm(
    counted: Sequence[nn.Parameter],
    clipped: Sequence[nn.Parameter],
    max_norm: float,
    over: dist.ProcessGroup | None,
    device: torch.device,
) -> torch.Tensor:
    """Clip gradients by the 2-norm of all gradients of the model, and return that norm.

    `counted`: as for `gradient_norm`; `clipped`: the parameters of this stage to clip; both may be empty.
    """
    if over is None:
        return nn.utils.clip_grad_norm_(clipped, max_norm)
    norm = gradient_norm(counted, over, device)
    # In float64 on every rank, so that copies of a tied parameter get the same factor.
    nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    return norm
