"""Backward in two halves: the gradient of the input first (`I`), the gradient of the weight later (`W`).

The graph of a chunk calls its layers through references, so an autograd function can replace a layer. `I` runs the
ordinary backward while a queue is open, and `W` runs the work in the queue. Other layers, and layers with hooks, run their
whole backward in `I`, which is correct but defers less.

Under autocast, a layer computes in the dtype of autocast: its input and its parameters are cast, as torch does, and the
gradients of parameters have the dtype of the parameters. Parameters are cast again in backward: micro-batches in flight
would otherwise keep a copy each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import fx, nn

__all__ = [
    "WeightWork",
    "cast_like_autocast",
    "defer_weights",
    "deferring",
    "later_or_now",
    "like_input",
    "original",
]

WeightWork = list[Callable[[], None]]
"""The deferred weight gradients of a chunk for one micro-batch."""

_open: list[WeightWork] = []  # the queue of deferred work; if there is none, backward functions run it at once


@contextmanager
def deferring() -> Iterator[WeightWork]:
    """Collect the weight gradients of a backward inside in a list instead of computing them."""
    work: WeightWork = []
    _open.append(work)
    try:
        yield work
    finally:
        _open.pop()


def defer_weights(chunk: fx.GraphModule) -> int:
    """Make the known layers of a chunk run their backward in two halves, and return their number."""
    found = 0
    read = {str(node.target).partition(".")[0] for node in chunk.graph.nodes if node.op == "get_attr"}
    for node in chunk.graph.nodes:
        if node.op != "call_module" or node.kwargs or len(node.args) != 1 or str(node.target) in read:
            continue  # other ops read the parameters of this layer, too
        layer: Any = chunk.__dict__.get(str(node.target))
        apply = _FUNCTIONS.get(type(layer))
        if apply is not None and _plain(layer):
            chunk.__dict__[str(node.target)] = _Deferred(layer, apply)
            found += 1
    return found


def _plain(layer: Any) -> bool:
    """Return whether a layer has no hooks and no option that changes its gradients."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq
    if isinstance(layer, nn.modules.conv._ConvNd):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return True


class _Deferred:
    """Replaces a layer in the graph of a chunk."""

    def __init__(self, layer: nn.Module, apply: Callable[..., torch.Tensor]) -> None:
        self.layer, self._apply = layer, apply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.layer.weight
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return self.layer(x)
        if torch.is_autocast_enabled(x.device.type) and not isinstance(self.layer, nn.Embedding):
            x = cast_like_autocast(x, torch.get_autocast_dtype(x.device.type))
        return self._apply(x, weight, getattr(self.layer, "bias", None), self.layer)


def original(layer: Any) -> Any:
    """Return the layer that an object of the graph of a chunk replaces, or the object itself."""
    return layer.layer if isinstance(layer, _Deferred) else layer


def cast_like_autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as autocast gives it to a layer: double precision and whole numbers are kept."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


@overload
def like_input(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...
@overload
def like_input(parameter: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None: ...
def like_input(parameter: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter in the dtype of the cast input, if autocast is on.

    Autocast itself would keep the copy, which has no gradient here, for other ops that use the parameter.
    """
    if parameter is None or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return parameter
    return cast_like_autocast(parameter, x.dtype)


def later_or_now(work: Callable[[], tuple[torch.Tensor | None, ...]], parameters: tuple[Any, ...]) -> tuple[Any, ...]:
    """Queue the work and return no gradients or, without an open queue, run it and return its gradients.

    Gradients for which parameters have hooks are returned, too: autograd calls the hooks.
    """
    if not _open or any(parameter is not None and parameter._backward_hooks for parameter in parameters):
        return work()
    _open[-1].append(partial(_accumulate, work, parameters))
    return tuple(None for _ in parameters)


@torch.no_grad()
def _accumulate(work: Callable[[], tuple[torch.Tensor | None, ...]], parameters: tuple[Any, ...]) -> None:
    for parameter, gradient in zip(parameters, work()):
        if parameter is not None and parameter.requires_grad and gradient is not None:
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: nn.Linear) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, like_input(weight, x), like_input(bias, x))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        layer = ctx.layer
        before = g.matmul(weight.to(g.dtype)) if ctx.needs_input_grad[0] else None

        def work() -> tuple[torch.Tensor | None, ...]:
            rows = g.reshape(-1, g.shape[-1])
            by_bias = rows.sum(0) if layer.bias is not None else None
            return rows.t().mm(x.reshape(-1, x.shape[-1])), by_bias

        return (before, *later_or_now(work, (layer.weight, layer.bias)), None)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: None, layer: nn.Embedding) -> Any:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return F.embedding(x, weight, layer.padding_idx)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        padding = -1 if layer.padding_idx is None else layer.padding_idx

        def work() -> tuple[torch.Tensor | None, ...]:
            dense = torch.ops.aten.embedding_dense_backward
            return (dense(g.contiguous(), x, layer.num_embeddings, padding, False),)

        return (None, *later_or_now(work, (layer.weight,)), None, None)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer._conv_forward(x, like_input(weight, x), like_input(bias, x))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        layer = ctx.layer
        sizes = None if layer.bias is None else list(layer.bias.shape)
        dims = len(layer.kernel_size)
        batched = x.dim() == dims + 2  # else one image without a batch dimension

        def half(mask: list[bool]) -> Any:
            gradient, image = (g, x) if batched else (g.unsqueeze(0), x.unsqueeze(0))
            return torch.ops.aten.convolution_backward(
                gradient, image, weight.to(g.dtype), sizes, layer.stride, layer.padding, layer.dilation, False, [0] * dims,
                layer.groups, mask,
            )  # fmt: skip

        before = half([True, False, False])[0] if ctx.needs_input_grad[0] else None
        if before is not None and not batched:
            before = before.squeeze(0)

        def work() -> tuple[torch.Tensor | None, ...]:
            _, by_weight, by_bias = half([False, True, layer.bias is not None])
            return by_weight, by_bias

        return (before, *later_or_now(work, (layer.weight, layer.bias)), None)


_FUNCTIONS: dict[type, Callable[..., torch.Tensor]] = {
    nn.Linear: _Linear.apply,
    nn.Embedding: _Embedding.apply,
    nn.Conv1d: _Conv.apply,
    nn.Conv2d: _Conv.apply,
    nn.Conv3d: _Conv.apply,
}
