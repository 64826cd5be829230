"""Gradients after the last backward: ties over stages are summed, replicas are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pipepart.runtime.mesh import Groups
from pipepart.runtime.ownership import Ownership

__all__ = ["GradientSync", "clip_grad_norm"]

_BUCKET_BYTES = 25 * 2**20


class GradientSync:
    """The collectives on gradients that a stage takes part in. Made once, by all ranks together."""

    def __init__(self, ownership: Ownership, groups: Groups | None, timeout: timedelta) -> None:
        self._groups = groups
        self._tied: dict[str, dist.ProcessGroup] = {}
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

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make the fresh gradients in `.grad` final: sum over ties, then mean over replicas."""
        for name, group in self._tied.items():
            parameter = parameters[name]
            if parameter.requires_grad:
                if parameter.grad is None:  # used here, but nothing flowed back: the others wait for our share
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        if self._groups is not None and self._groups.copies is not None:
            self._average([p for p in parameters.values() if p.requires_grad], self._groups)

    def _average(self, parameters: Sequence[nn.Parameter], groups: Groups) -> None:
        replicas = groups.mesh.replicas
        # Replicas may disagree on which parameters got a gradient (routing, skipped branches); the collective must not.
        have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        if parameters:
            have = have.to(parameters[0].device)
            dist.all_reduce(have, op=dist.ReduceOp.MAX, group=groups.copies)
        used = [p for p, any_has in zip(parameters, have.tolist()) if any_has]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets(used):
            gradients = [p.grad for p in bucket if p.grad is not None]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            dist.all_reduce(flat, group=groups.copies)
            flat /= replicas
            for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients])):
                gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Neighbouring parameters of one dtype, up to `_BUCKET_BYTES` together."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        full = size + parameter.numel() * parameter.element_size() > _BUCKET_BYTES
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def clip_grad_norm(
    counted: Sequence[nn.Parameter], clipped: Sequence[nn.Parameter], max_norm: float, groups: Groups | None
) -> torch.Tensor:
    """Clip by the 2-norm of all gradients of the whole model.

    `counted`: this stage's share of the norm, each parameter on one stage only; `clipped`: all that it holds.
    """
    if groups is None or groups.mesh.stages == 1:
        return nn.utils.clip_grad_norm_(clipped, max_norm)
    device = clipped[0].device if clipped else torch.device("cpu")
    square = torch.zeros((), device=device)
    for parameter in counted:
        if parameter.grad is not None:
            square += parameter.grad.detach().float().pow(2).sum()
    dist.all_reduce(square, group=groups.pipeline)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in clipped:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
