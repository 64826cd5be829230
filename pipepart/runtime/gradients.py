"""Gradients after the last backward: ties over stages are summed, replicas are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pipepart.runtime.mesh import Groups
from pipepart.runtime.ownership import Ownership
from pipepart.runtime.replicas import ReplicaMean
from pipepart.runtime.tracing import Trace
from pipepart.schedule import Action

__all__ = ["GradientSync", "clip_grad_norm", "gradient_norm"]


class GradientSync:
    """The collectives on gradients that a stage takes part in. Made once, by all ranks together."""

    def __init__(
        self, ownership: Ownership, groups: Groups | None, timeout: timedelta, uses: Mapping[str, Sequence[int]]
    ) -> None:
        """`uses`: the chunks of this stage that use each parameter."""
        self.mean: ReplicaMean | None = None
        self._tied: dict[str, dist.ProcessGroup] = {}
        self._first_chunk = min((chunk for chunks in uses.values() for chunk in chunks), default=0)
        if groups is None:
            return
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, stages in ownership.tied.items():
            if stages not in made:
                made[stages] = None  # every rank takes part in making every group, also those that it is not in
                for replica in range(groups.mesh.replicas):
                    ranks = [groups.mesh.rank(replica, stage) for stage in stages]
                    group = dist.new_group(ranks, timeout=timeout)
                    if groups.rank in ranks:
                        made[stages] = group
            own = made[stages]
            if own is not None:
                self._tied[name] = own
        if groups.copies is not None:
            self.mean = ReplicaMean(groups.copies, groups.mesh.replicas, uses, set(self._tied))

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """A step whose gradients will be reduced starts."""
        if self.mean is not None:
            self.mean.begin(parameters)

    def reduce(self, parameters: Mapping[str, nn.Parameter], trace: Trace | None = None) -> None:
        """Make the fresh gradients in `.grad` final: sum over ties, then mean over replicas."""
        if not self._tied and self.mean is None:
            return
        started = trace.now() if trace is not None else None
        for name, group in self._tied.items():
            parameter = parameters[name]
            if parameter.requires_grad:
                if parameter.grad is None:  # used here, but nothing flowed back: the others wait for our share
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        if self.mean is not None:
            self.mean.finish()
        if trace is not None:
            trace.add(Action("REDUCE", self._first_chunk, 0), started)


@torch.no_grad()
def gradient_norm(counted: Sequence[nn.Parameter], groups: Groups | None, device: torch.device) -> torch.Tensor:
    """The 2-norm of all gradients of the whole model, in float64.

    `counted`: this stage's share of the norm, each parameter on one stage only; it may be empty.
    """
    own = nn.utils.get_total_norm([_countable(p.grad) for p in counted if p.grad is not None])
    norm = own.to(device, torch.float64)
    if groups is None or groups.mesh.stages == 1:
        return norm
    square = norm.square()
    dist.all_reduce(square, group=groups.pipeline)
    return square.sqrt()


def _countable(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor of the same norm that `get_total_norm` takes, and takes exactly."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.dtype in (torch.float16, torch.bfloat16):  # their own norms would be rounded to 16 bits
        return torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return gradient


def clip_grad_norm(
    counted: Sequence[nn.Parameter],
    clipped: Sequence[nn.Parameter],
    max_norm: float,
    groups: Groups | None,
    device: torch.device,
) -> torch.Tensor:
    """Clip by the 2-norm of all gradients of the whole model.

    `counted`: as for `gradient_norm`; `clipped`: all parameters that this stage holds, which may be none.
    """
    if groups is None or groups.mesh.stages == 1:
        return nn.utils.clip_grad_norm_(clipped, max_norm)
    norm = gradient_norm(counted, groups, device)
    # In float64 on every stage: copies of a tied parameter are multiplied by the same number.
    nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    return norm
