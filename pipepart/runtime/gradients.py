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

__all__ = ["GradientSync", "clip_grad_norm"]


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


def clip_grad_norm(
    counted: Sequence[nn.Parameter],
    clipped: Sequence[nn.Parameter],
    max_norm: float,
    groups: Groups | None,
    device: torch.device,
) -> torch.Tensor:
    """Clip by the 2-norm of all gradients of the whole model.

    `counted`: this stage's share of the norm, each parameter on one stage only; `clipped`: all that it holds, which may be
    nothing.
    """
    if groups is None or groups.mesh.stages == 1:
        return nn.utils.clip_grad_norm_(clipped, max_norm)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in counted:
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            square += (gradient if gradient.dtype == torch.float64 else gradient.float()).pow(2).sum()
    dist.all_reduce(square, group=groups.pipeline)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in clipped:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
