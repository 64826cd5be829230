"""The cross-entropy of a linear layer for some tokens at a time: the scores of all tokens never exist together.

```
forward   per slice: scores, loss, gradient of the scores, gradient of the hidden states
I or B    the gradient of the hidden states, times the gradient of the loss
W or B    per slice: scores and their gradient again, gradient of the weight
```

Between forward and backward the hidden states and their gradient are kept, and neither scores nor probabilities. The weight
gets its gradient in the second half of backward, from scores that are computed once more: the gradient of a slice could make
that of the weight in the forward, but each micro-batch in flight would then keep a matrix of the size of the weight, and
a schedule with a divided backward would have nothing left to delay. So the head needs four products instead of three.

The ops on a slice are those of the model, under the autocast of the model, so a result differs by rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from pipepart.runtime.deferred import cast_like_autocast, later_or_now, like_input

__all__ = ["sliced_cross_entropy"]


def sliced_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None = None,
    *,
    tokens: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    casts: tuple[torch.dtype, ...] = (),
) -> torch.Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias), target)``, computed for so many tokens at a time.

    `hidden` has its features where `cross_entropy` has the classes. `casts` are the types to which the scores are converted.
    """
    rows = hidden.movedim(min(1, hidden.dim() - 1), -1).reshape(-1, hidden.shape[-1 if hidden.dim() < 3 else 1])
    targets = target.reshape(-1)
    if torch.is_autocast_enabled(rows.device.type):
        rows = cast_like_autocast(rows, torch.get_autocast_dtype(rows.device.type))
    how = _Loss(tokens, ignore_index, float(label_smoothing), casts, class_weight)
    scale = how.denominator(targets) if reduction == "mean" else None
    needed = any(part is not None and part.requires_grad for part in (rows, weight, bias))
    if not torch.is_grad_enabled() or not needed:
        return how.total(rows, like_input(weight, rows), like_input(bias, rows), targets, None, scale)
    loss: torch.Tensor = _SlicedHead.apply(rows, weight, bias, targets, scale, how)
    return loss


@dataclass(frozen=True, eq=False)
class _Loss:
    """The settings of a loss."""

    tokens: int
    ignore_index: int
    smoothing: float
    casts: tuple[torch.dtype, ...]
    weight: torch.Tensor | None

    def slices(self, rows: torch.Tensor) -> Iterator[slice]:
        """Yield the slices of the tokens; there is one even if there are no tokens."""
        for start in range(0, max(1, len(rows)), self.tokens):
            yield slice(start, min(start + self.tokens, len(rows)))

    def denominator(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the number of targets that are not ignored, or the sum of their weights."""
        kept = targets != self.ignore_index
        if self.weight is None:
            return kept.sum()
        return torch.where(kept, self.weight[torch.where(kept, targets, 0)], 0.0).sum()

    def of_slice(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of some tokens."""
        for dtype in self.casts:
            scores = scores.to(dtype)
        return F.cross_entropy(
            scores,
            targets,
            self.weight,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.smoothing,
        )

    def with_gradient(self, scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of some tokens, and its gradient by their scores."""
        with torch.enable_grad():
            scores = scores.detach().requires_grad_()
            loss = self.of_slice(scores, targets)
        (gradient,) = torch.autograd.grad(loss, scores)
        return loss.detach(), gradient

    def total(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        into: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the loss of all tokens, divided by `scale`; write the gradient of its sum by the hidden states to `into`."""
        sums = []
        for part in self.slices(rows):
            scores = F.linear(rows[part], weight, bias)
            if into is None:
                loss = self.of_slice(scores, targets[part])
            else:
                loss, gradient = self.with_gradient(scores, targets[part])
                torch.mm(gradient.to(weight.dtype), weight, out=into[part])
            sums.append(loss)
        kind = sums[0].dtype
        whole = torch.stack(sums).to(torch.promote_types(kind, torch.float32)).sum()
        return (whole if scale is None else whole / scale).to(kind)


class _SlicedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: torch.Tensor | None,
        how: _Loss,
    ) -> torch.Tensor:
        trained = any(part is not None and part.requires_grad for part in (weight, bias))
        into = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        loss = how.total(rows, like_input(weight, rows), like_input(bias, rows), targets, into, scale)
        ctx.save_for_backward(rows if trained else None, weight, bias, targets, scale, into)
        ctx.how, ctx.parameters, ctx.autocast = how, (weight, bias), _autocast_now(rows.device.type)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        rows, weight, bias, targets, scale, into = ctx.saved_tensors
        how, parameters, autocast = ctx.how, ctx.parameters, ctx.autocast
        if scale is not None:  # without any target, the gradients of all scores are zero
            g = torch.where(scale == 0, 0.0, g / scale).to(g.dtype)
        before = None
        if into is not None:
            before = (into.to(torch.promote_types(into.dtype, g.dtype)) * g).to(into.dtype)

        def work() -> tuple[torch.Tensor | None, ...]:
            return _of_parameters(how, rows, weight, bias, targets, g, autocast)

        after: tuple[Any, ...] = (None, None)
        if rows is not None:
            after = later_or_now(work, parameters)
        return (before, *after, None, None, None)


def _of_parameters(
    how: _Loss,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    g: torch.Tensor,
    autocast: dict[str, Any],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weight and bias, summed over the slices at least in single precision."""
    by_weight = by_bias = None
    kind = torch.promote_types(weight.dtype, torch.float32)
    if weight.requires_grad:
        by_weight = torch.zeros_like(weight, dtype=kind)
    if bias is not None and bias.requires_grad:
        by_bias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
    with _autocast_as(autocast):
        cast, added = like_input(weight.detach(), rows), like_input(None if bias is None else bias.detach(), rows)
        for part in how.slices(rows):
            _, gradient = how.with_gradient(F.linear(rows[part], cast, added), targets[part])
            if by_weight is not None and gradient.dtype == rows.dtype == by_weight.dtype:
                by_weight.addmm_(gradient.t(), rows[part])
            elif by_weight is not None:
                by_weight += gradient.to(rows.dtype).t().mm(rows[part])
            if by_bias is not None:
                by_bias += gradient.sum(0)
    return tuple(None if one is None else one.mul_(g.to(one.dtype)) for one in (by_weight, by_bias))  # type: ignore[return-value]


def _autocast_now(device: str) -> dict[str, Any]:
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
    }


def _autocast_as(settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return the autocast of the forward. It keeps no copies of parameters, since these have no gradient here."""
    return torch.autocast(**settings, cache_enabled=False)
