"""Losses as people write them, over one small model: what they are for the whole batch is known, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


class Model(nn.Module):
    """Scores for each token; `form` makes the loss (or several values) of them."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.of_sums = 1.0
        """The weight of sums that nothing divides: accumulated batches average them, as Lightning does."""
        self.register_buffer("class_weights", torch.linspace(0.2, 1.4, CLASSES))
        self.pos_weight = torch.linspace(0.5, 2.0, CLASSES)
        self.cross = nn.CrossEntropyLoss(weight=torch.linspace(1.0, 2.0, CLASSES), ignore_index=-1)
        self.nll = nn.NLLLoss(ignore_index=-1)
        self.mse = nn.MSELoss()
        self.bce = nn.BCEWithLogitsLoss(pos_weight=torch.linspace(0.5, 2.0, CLASSES))
        self.kl = nn.KLDivLoss(reduction="batchmean")
        self.huber = nn.HuberLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, soft: torch.Tensor) -> Any:
        return self.form(self, self.body(x), y, mask, soft)


def batch(size: int, seed: int = 0, length: int = 4) -> tuple[torch.Tensor, ...]:
    """Samples of very different numbers of tokens; the last ones have none at all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, length, 6, generator=generator)
    y = torch.randint(0, CLASSES, (size, length), generator=generator)
    lengths = torch.arange(size).mul(7).add(seed) % (length + 1)
    lengths[0], lengths[size // 2 :] = length, lengths[size // 2 :].clamp(max=1)
    lengths[-1] = 0
    mask = torch.arange(length)[None] < lengths[:, None]
    y = y.masked_fill(~mask, -1)
    soft = torch.rand(size, length, CLASSES, generator=generator)
    return x, y, mask, soft / soft.sum(-1, keepdim=True)


def _tokens(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of each token, those without a target too."""
    return F.cross_entropy(o.flatten(0, 1), y.clamp(min=0).flatten(), reduction="none").view_as(y)


def _in_place(m: Any, o: Any, y: Any, mask: Any, s: Any) -> Any:
    loss = torch.zeros((), dtype=o.dtype)
    loss += F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1)
    loss = loss + 0.5 * o.abs().mean()
    loss /= 2
    return loss


def _scaled(m: Any, o: Any, y: Any, mask: Any, s: Any) -> Any:
    """Each sample divided by its mean, and by that of the batch where it has none (a scaler of GluonTS)."""
    sums, counts = (s[..., 0] * mask).sum(1, keepdim=True), mask.sum(1, keepdim=True)
    of_batch = torch.squeeze(sums.sum(0) / counts.sum(0).clamp(min=1))
    scale = torch.where(counts > 0, sums / counts.clamp(min=1), of_batch)
    if not (scale > 0).all():
        raise ValueError("no sample has a scale")
    return (o / scale[..., None] - s).square().mean()


def _changes_labels(m: Any, o: Any, y: Any, mask: Any, s: Any) -> Any:
    y = y.clone()
    y[y == 2] = -1
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1)


def _changes_batch(m: Any, o: Any, y: Any, mask: Any, s: Any) -> Any:
    y[y == 2] = -1
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1)


def _listed(m: Any, o: Any, y: Any, mask: Any, s: Any) -> Any:
    terms = [F.cross_entropy(o[:, i], y[:, i], ignore_index=-1, reduction="sum") / mask.sum() for i in range(4)]
    return sum(terms) + torch.stack([o.mean(), o.pow(2).mean()]).sum() + torch.stack(terms).mean()


def _with_logs(m: Any, o: Any, y: Any, mask: Any, s: Any) -> Any:
    loss = F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1)
    hits = (o.argmax(-1) == y)[mask]
    return {
        "loss": loss,
        "detached": loss.detach(),
        "hits": hits.float().mean(),
        "count": hits.sum(),
        "tokens": mask.sum(),
        "filled": mask.float().mean(),
        "by_hand": ((o.argmax(-1) == y) * mask).sum() / mask.sum(),
        "spread": mask.float().sum(1).std(),
        "plain": o.mean(),
        "decay": m.scale.detach() ** 2,
    }


FORMS: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda m, o, y, k, s: F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1),
    "cross_entropy transposed": lambda m, o, y, k, s: F.cross_entropy(o.transpose(1, 2), y, ignore_index=-1),
    "cross_entropy weights": lambda m, o, y, k, s: F.cross_entropy(
        o.flatten(0, 1), y.flatten(), weight=m.class_weights, ignore_index=-1
    ),
    "cross_entropy smoothing": lambda m, o, y, k, s: F.cross_entropy(
        o.flatten(0, 1), y.flatten(), ignore_index=-1, label_smoothing=0.1
    ),
    "cross_entropy smoothing weights": lambda m, o, y, k, s: F.cross_entropy(
        o.flatten(0, 1), y.flatten(), weight=m.class_weights, ignore_index=-1, label_smoothing=0.1
    ),
    "cross_entropy probabilities": lambda m, o, y, k, s: F.cross_entropy(o.flatten(0, 1), s.flatten(0, 1)),
    "cross_entropy probabilities selected": lambda m, o, y, k, s: F.cross_entropy(
        o[k], s[k], weight=m.class_weights, label_smoothing=0.1
    ),
    "cross_entropy sum": lambda m, o, y, k, s: m.of_sums
    * F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum"),
    "cross_entropy selected": lambda m, o, y, k, s: F.cross_entropy(o[k], y[k]),
    "cross_entropy module": lambda m, o, y, k, s: m.cross(o.flatten(0, 1), y.flatten()) * m.scale,
    "nll_loss": lambda m, o, y, k, s: F.nll_loss(
        o.log_softmax(-1).flatten(0, 1), y.flatten(), weight=m.class_weights, ignore_index=-1
    ),
    "nll_loss module": lambda m, o, y, k, s: m.nll(o.log_softmax(-1).flatten(0, 1), y.flatten()),
    "bce": lambda m, o, y, k, s: F.binary_cross_entropy(o.sigmoid(), s),
    "bce selected": lambda m, o, y, k, s: F.binary_cross_entropy(o.sigmoid()[k], s[k]),
    "bce_with_logits": lambda m, o, y, k, s: F.binary_cross_entropy_with_logits(o[k], s[k], pos_weight=m.pos_weight),
    "bce_with_logits weights": lambda m, o, y, k, s: F.binary_cross_entropy_with_logits(o, s, weight=k[..., None].to(o.dtype)),
    "bce_with_logits module": lambda m, o, y, k, s: m.bce(o[k], s[k]),
    "kl_div mean": lambda m, o, y, k, s: F.kl_div(o.log_softmax(-1)[k], s[k]),
    "kl_div batchmean": lambda m, o, y, k, s: F.kl_div(o.log_softmax(-1), s, reduction="batchmean"),
    "kl_div batchmean selected": lambda m, o, y, k, s: F.kl_div(o.log_softmax(-1)[k], s[k], reduction="batchmean"),
    "kl_div sum": lambda m, o, y, k, s: m.of_sums * F.kl_div(o.log_softmax(-1), s, reduction="sum"),
    "kl_div module": lambda m, o, y, k, s: m.kl(o.log_softmax(-1)[k], s[k]),
    "mse": lambda m, o, y, k, s: F.mse_loss(o, s),
    "mse selected": lambda m, o, y, k, s: F.mse_loss(o[k], s[k]),
    "mse module selected": lambda m, o, y, k, s: m.mse(o[k], s[k]),
    "mse weights": lambda m, o, y, k, s: F.mse_loss(o, s, weight=k[..., None].expand(-1, -1, CLASSES) + 0.1),
    "l1 selected": lambda m, o, y, k, s: F.l1_loss(o[k], s[k]),
    "smooth_l1 selected": lambda m, o, y, k, s: F.smooth_l1_loss(o[k], s[k], beta=0.5),
    "huber module": lambda m, o, y, k, s: m.huber(o[k], s[k]),
    "poisson": lambda m, o, y, k, s: F.poisson_nll_loss(o[k], s[k]),
    "masked mean": lambda m, o, y, k, s: _tokens(o, y)[k].mean(),
    "masked_select": lambda m, o, y, k, s: _tokens(o, y).masked_select(k).mean(),
    "masked rows": lambda m, o, y, k, s: (o[k].square() * m.scale).mean(),
    "rows and elements": lambda m, o, y, k, s: F.mse_loss(o[k], s[k]) + F.l1_loss(o[k].flatten(), s[k].flatten()),
    "masked positions": lambda m, o, y, k, s: o[torch.where(k)].square().mean(),
    "nonzero": lambda m, o, y, k, s: o.flatten(0, 1)[k.flatten().nonzero().squeeze(1)].square().mean(),
    "layers after a selection": lambda m, o, y, k, s: F.cross_entropy(F.linear(o[k].tanh(), m.body[2].weight.T)[:, :5], y[k]),
    "by hand": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / k.sum(),
    "by hand clamp": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / k.sum().clamp(min=1),
    "by hand eps": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / (k.float().sum() + 1e-6),
    "by hand maximum": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / torch.maximum(k.sum(), torch.tensor(1)),
    "by hand max": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / max(k.sum(), 1),
    "by hand item": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / k.sum().item(),
    "by hand max item": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / max(k.sum().item(), 1),
    "by hand means": lambda m, o, y, k, s: (_tokens(o, y) * k).mean() / k.to(o.dtype).mean(),
    "by hand reciprocal": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() * (1.0 / k.sum()),
    "by hand dot": lambda m, o, y, k, s: (_tokens(o, y) * (k / k.sum())).sum(),
    "each / batch size": lambda m, o, y, k, s: (_tokens(o, y) * k / len(y)).sum(),
    "inputs / largest": lambda m, o, y, k, s: (o * (s / s.max())).mean(),
    "sum": lambda m, o, y, k, s: m.of_sums * (_tokens(o, y) * k).sum(),
    "sum / batch size": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / o.shape[0],
    "sum / len": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / len(y),
    "sum / numel": lambda m, o, y, k, s: (_tokens(o, y) * k).sum() / y.numel(),
    "mean over dim 0": lambda m, o, y, k, s: (_tokens(o, y) * k).mean(0).sum() + o.square().sum((1, 2)).mean(0),
    "none and own mean": lambda m, o, y, k, s: (F.mse_loss(o, s, reduction="none").mean(-1) * k).sum() / k.sum(),
    "per sample": lambda m, o, y, k, s: ((_tokens(o, y) * k).sum(1) / k.sum(1).clamp(min=1)).mean(),
    "several": lambda m, o, y, k, s: (
        F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1)
        + 0.3 * F.mse_loss(o, s)
        - 0.01 * (_tokens(o, y) * k).sum() / k.any(1).sum()
        + 1e-2 * m.scale.square()
        + 0.001 * m.of_sums * o.square().sum()
        + 1.5
    ),
    "difference of means": lambda m, o, y, k, s: 1.0 - F.l1_loss(o[k], s[k]) / 3,
    "in place": _in_place,
    "labels changed": _changes_labels,
    "batch changed": _changes_batch,
    "scaled by samples, or by the batch": _scaled,
    "lists": _listed,
    "logs": _with_logs,
}  # fmt: skip
