"""BatchNorm over replicas: a micro-batch is normalised with the statistics of the same micro-batch in all replicas.

`torch.nn.SyncBatchNorm` communicates in the default group, in which stages that have no such layer would have to take part,
and only on accelerators. Here the ranks that hold the same stage exchange their statistics, on every device. All replicas run
one schedule, so their collectives have one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.devices import backend_for
from pipepart.errors import ConfigError, PipelineError
from pipepart.recording import Recording
from pipepart.runtime.meeting import reduce_numbers
from pipepart.runtime.mesh import Groups, connect, own_group
from pipepart.runtime.strangers import closed_to_strangers

__all__ = ["COUNTED", "ReplicaStatistics", "refuse_functions"]

COUNTED = "_pipepart_counted"
"""Attribute of a layer: the number of values per channel in its last call, over all replicas."""


class ReplicaStatistics:
    """The BatchNorm layers of a model, whose statistics are those of all replicas in training steps."""

    def __init__(self, root: nn.Module, groups: Groups) -> None:
        """All ranks must call it together."""
        self._layers = [module for module in root.modules() if isinstance(module, _BatchNorm)]
        self._groups = groups
        ranks = [groups.mesh.copies(stage) for stage in range(groups.mesh.stages)]
        with closed_to_strangers():
            timeout = timedelta(seconds=groups.timeout)
            group = own_group(groups.rank, ranks, timeout, backend_for(groups.device))
        assert group is not None
        connect(group, groups.device)
        groups.watch_over(group)
        self.group = group
        self._checked: set[int] = set()

    @contextmanager
    def shared(self, recording: Recording, microbatches: int) -> Iterator[None]:
        """Share the statistics of the training step inside. Every rank must call it."""
        if not self._layers:
            yield
            return
        self._check(recording, microbatches)
        for layer in self._layers:
            layer.__dict__["forward"] = partial(_forward, layer, self.group)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)
                layer.__dict__.pop(COUNTED, None)

    def _check(self, recording: Recording, microbatches: int) -> None:
        """Refuse steps whose replicas would wait for each other, and layers whose statistics would not be shared."""
        if id(recording) not in self._checked:
            refuse_functions(recording.graph, "sync_batchnorm=True")
            self._checked.add(id(recording))
        counts = torch.zeros(self._groups.mesh.replicas, dtype=torch.int64)
        counts[self._groups.replica] = microbatches
        reduce_numbers(counts, self._groups, self._groups.numbers, dist.ReduceOp.SUM)
        if len(set(counts.tolist())) > 1:
            raise PipelineError(
                f"the replicas have {', '.join(map(str, counts.tolist()))} micro-batches in this step, and sync_batchnorm=True "
                "needs equal numbers: a replica would wait for statistics that do not come. Use drop_last=True in the loader, "
                "or fewer micro-batches."
            )


def refuse_functions(graph: Any, option: str) -> None:
    """Refuse calls of BatchNorm as a function, which have no layer."""
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") in ("batch_norm", "native_batch_norm"):
            raise ConfigError(
                f"{option} needs torch.nn.BatchNorm layers, but {node.name!r} is a call of the function "
                f"{node.target.__name__}. Use the layer, or leave the option out."
            )


def _forward(layer: _BatchNorm, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """The forward of a BatchNorm layer with the statistics of all members of a group."""
    if not layer.training:
        unshared: torch.Tensor = type(layer).forward(layer, x)
        return unshared
    layer._check_input_dim(x)
    made, mean, variance, count = _Normalised.apply(x, layer.weight, layer.bias, layer.eps, group)
    layer.__dict__[COUNTED] = int(count)
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
            share = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked or 1)
            unbiased = variance * (count / max(count - 1, 1))
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share)
    normalised: torch.Tensor = made
    return normalised


class _Normalised(torch.autograd.Function):
    """Normalisation by the statistics of all members of a group, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, group: Any) -> Any:  # type: ignore[override]
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        others = [dim for dim in range(x.dim()) if dim != 1]
        count, channels = x.numel() // max(x.shape[1], 1), x.shape[1]
        mean = values.mean(others) if count else values.new_zeros(channels)
        squares = (values - _wide(mean, x)).square().sum(others)
        own = torch.cat([mean.double(), squares.double(), mean.new_tensor([count], dtype=torch.float64)])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        counts = torch.stack([part[-1] for part in parts])
        total = int(counts.sum())
        means = torch.stack([part[:channels] for part in parts])
        mean = (means * counts[:, None]).sum(0) / total
        deviations = torch.stack([part[channels:-1] for part in parts]) + counts[:, None] * (means - mean).square()
        variance = deviations.sum(0) / total
        mean, scale = mean.to(values.dtype), torch.rsqrt(variance + eps).to(values.dtype)
        standard = (values - _wide(mean, x)) * _wide(scale, x)
        ctx.save_for_backward(standard, weight, scale)
        ctx.group, ctx.total, ctx.others, ctx.dtype = group, total, others, x.dtype
        made = standard if weight is None else standard * _wide(weight.to(values.dtype), x)
        made = made if bias is None else made + _wide(bias.to(values.dtype), x)
        variance = variance.to(values.dtype)
        ctx.mark_non_differentiable(mean, variance)
        return made.to(x.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:  # type: ignore[override]
        standard, weight, scale = ctx.saved_tensors
        wide = gradient.to(standard.dtype)
        sums, products = wide.sum(ctx.others), (wide * standard).sum(ctx.others)
        both = torch.stack([sums, products]).double()
        dist.all_reduce(both, group=ctx.group)
        mean, product = (both / ctx.total).to(standard.dtype)
        inner = wide - _wide(mean, wide) - standard * _wide(product, wide)
        inner = inner * _wide(scale if weight is None else scale * weight.to(scale.dtype), wide)
        of_weight = products.to(weight.dtype) if weight is not None else None
        of_bias = sums.to(weight.dtype) if weight is not None else None
        return inner.to(ctx.dtype), of_weight, of_bias, None, None


def _wide(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A value per channel, in the shape in which it broadcasts to `like`."""
    return value.view(1, -1, *(1,) * (like.dim() - 2))
