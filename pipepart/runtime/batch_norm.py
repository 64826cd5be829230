"""Running statistics of BatchNorm that are updated once per batch instead of once per micro-batch.

Each micro-batch is still normalised with its own statistics, since those of the next micro-batch are not known yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.recording import Chunk
from pipepart.runtime.randomness import running_again
from pipepart.runtime.replica_norm import COUNTED, refuse_functions

__all__ = ["BatchStatistics"]


@dataclass
class _Sums:
    """Sums of one layer over the micro-batches of a step, per channel."""

    count: int = 0
    total: torch.Tensor | None = None
    squares: torch.Tensor | None = None

    def add(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Add the statistics of a micro-batch. `variance` is the unbiased variance, which BatchNorm keeps."""
        mean, variance = mean.double(), variance.double()
        total = mean * count
        squares = variance * max(count - 1, 0) + mean.square() * count
        self.count += count
        self.total = total if self.total is None else self.total + total
        self.squares = squares if self.squares is None else self.squares + squares

    def mean_and_variance(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.total is not None and self.squares is not None
        mean = self.total / self.count
        return mean, (self.squares - self.count * mean.square()).clamp(min=0) / max(self.count - 1, 1)


class BatchStatistics:
    """The BatchNorm layers of one stage.

    With momentum 1 the buffers of a layer hold the statistics of its last call. They are read after every call, summed,
    and applied as one update at the end of the step.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._layers: list[_BatchNorm] = []
        self._sums: dict[int, _Sums] = {}
        for chunk in chunks:
            refuse_functions(chunk.module.graph, "batch_norm='batch'")
            for layer in (getattr(chunk.module, n.target) for n in chunk.module.graph.nodes if n.op == "call_module"):
                if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer not in self._layers:
                    self._layers.append(layer)

    @contextmanager
    def one_update(self) -> Iterator[None]:
        """Update the statistics once for the training step inside."""
        training = [layer for layer in self._layers if layer.training and layer.running_mean is not None]
        names = ("running_mean", "running_var", "num_batches_tracked")
        before = [
            (layer.momentum, {name: b.clone() for name in names if (b := getattr(layer, name)) is not None})
            for layer in training
        ]
        self._sums = {}
        hooks = [layer.register_forward_hook(self._seen) for layer in training]
        for layer in training:
            layer.momentum = 1.0
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer, (momentum, buffers) in zip(training, before):
                self._update(layer, momentum, buffers)

    def _seen(self, layer: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
        assert isinstance(layer, _BatchNorm)
        if layer.training and not running_again() and layer.running_mean is not None:
            x = inputs[0]
            assert layer.running_var is not None
            count = layer.__dict__.get(COUNTED, x.numel() // max(x.shape[1], 1))
            self._sums.setdefault(id(layer), _Sums()).add(count, layer.running_mean, layer.running_var)

    @torch.no_grad()
    def _update(self, layer: _BatchNorm, momentum: float | None, before: Mapping[str, torch.Tensor]) -> None:
        """Restore momentum and buffers of a layer, and apply the statistics of the step as one update."""
        layer.momentum = momentum
        for name, value in before.items():
            getattr(layer, name).copy_(value)
        sums = self._sums.get(id(layer))
        if sums is None:  # the layer was not called
            return
        assert layer.running_mean is not None and layer.running_var is not None
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        share = momentum if momentum is not None else 1.0 / float(layer.num_batches_tracked or 1)
        mean, variance = sums.mean_and_variance()
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
        layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)
