"""Differences between the outcomes of two runs, apart from rounding errors.

Gradients that cancel to zero consist of rounding errors, and no two orders of summation agree on them. The bias before a
batch norm and the last bias below a loss of distances have such gradients. The size of the errors is measured: the
parameters are changed a little, and such gradients take other values of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.proof.outcome import Outcome, compact

__all__ = ["Difference", "beyond_rounding", "differ", "differences", "largest_of"]

_INF = float("inf")
_SAME = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
"""Relative tolerance of results that come from the same ops."""
_NOISE = 16
"""Number of rounding errors by which a gradient that cancels to zero may differ."""


@dataclass(frozen=True)
class Difference:
    """One difference of two runs, named such as ``output 0``, ``buffer mean`` or ``gradient of weight``."""

    kind: str
    name: str
    text: str
    size: float
    """The largest difference relative to the largest expected element; infinite if they cannot be compared."""
    worst: float = _INF
    """The largest difference."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.text}"


def differences(got: Outcome, wanted: Outcome, fake: bool = False) -> list[Difference]:
    """Return the differences of one outcome from another; with `fake`, only shapes and dtypes of outputs are compared."""
    found: list[Difference] = []
    for i, (value, other) in enumerate(zip(got.values, wanted.values)):
        if isinstance(other, torch.Tensor):
            found += _compared("output", str(i), value, other, fake)
    if fake:
        return found
    for name, buffer in wanted.buffers.items():
        found += _compared("buffer", name, got.buffers.get(name), buffer)
    if wanted.gradients is None or got.gradients is None:
        return found
    largest = cache(partial(largest_of, wanted.gradients.values()))
    for name, gradient in wanted.gradients.items():
        found += _compared_gradients(name, got.gradients.get(name), gradient, largest)
    return found


def largest_of(gradients: Iterable[torch.Tensor | None]) -> float:
    """Return the largest finite element of all gradients, to which rounding errors are compared."""
    sizes = [float(g.abs().max()) for g in gradients if g is not None and g.numel()]
    return max((size for size in sizes if size < _INF), default=0.0)


def differ(got: torch.Tensor | None, wanted: torch.Tensor | None, largest: float = 0.0, exact: bool = False) -> bool:
    """Return whether two tensors differ, without `exact` by more than rounding errors; None equals None only.

    `largest` is the largest of all gradients: rounding errors that should cancel may have this scale.
    """
    if got is None or wanted is None:
        return got is not wanted
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return True
    worst, scale = _distance(compact(got), compact(wanted))
    return worst > 0.0 if exact else not _is_rounding(worst, scale, wanted.dtype, largest)


def _compared_gradients(
    name: str, got: torch.Tensor | None, wanted: torch.Tensor | None, largest: Callable[[], float]
) -> list[Difference]:
    """Compare two gradients. None and zeros differ: an optimizer skips a parameter without a gradient, and decays the other."""
    if got is None and wanted is None:
        return []
    if got is None or wanted is None:
        text = "is missing" if got is None else "is present, but the model gives none"
        return [Difference("gradient of", name, text, _INF)]
    return _compared("gradient of", name, got, wanted, largest=largest)


def _compared(
    kind: str,
    name: str,
    value: Any,
    wanted: torch.Tensor,
    fake: bool = False,
    largest: Callable[[], float] | None = None,
) -> list[Difference]:
    if not isinstance(value, torch.Tensor):
        return [Difference(kind, name, f"is {type(value).__name__}, expected a tensor", _INF)]
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        text = f"is {value.dtype} {tuple(value.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
        return [Difference(kind, name, text, _INF)]
    if fake:
        return []
    worst, scale = _distance(value, wanted)
    if _is_rounding(worst, scale, wanted.dtype):
        return []
    if largest is not None and _is_rounding(worst, scale, wanted.dtype, largest()):
        return []
    if worst == _INF:
        return [Difference(kind, name, "has other values", _INF)]
    text = f"differs by up to {worst:.3g} (its largest element is {scale:.3g})"
    return [Difference(kind, name, text, worst / scale if scale else _INF, worst)]


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors of one shape, and the largest finite element of the second."""
    if not wanted.numel() or torch.equal(got, wanted):
        return 0.0, 1.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return _INF, 1.0
    a, b = _real(got), _real(wanted)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().masked_fill(same, 0.0)
    worst = float(torch.nan_to_num(apart, nan=_INF, posinf=_INF).max())
    sizes = b.abs()
    scale = float(sizes.masked_fill(~sizes.isfinite(), 0.0).max())
    return worst, scale


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in _SAME else tensor.float()


def _is_rounding(worst: float, scale: float, dtype: torch.dtype, largest: float = 0.0) -> bool:
    """Return whether a difference is a rounding error of an element of size `scale`, or of gradients up to `largest`.

    Results in half precision may differ by one bit.
    """
    eps = float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype in _SAME else 0.0
    noise = _NOISE * eps * largest if dtype in _SAME else 0.0
    return worst <= max(_SAME.get(dtype, eps) * scale, noise)


# ---------------------------------------------------------------- measured rounding errors

_TRIES = 3
_STEP = 0.75
"""Parameters are changed by this power of the machine precision, relative to their size."""
_MARGIN = 16.0
"""Gradients are equal if they differ by at most this multiple of their measured change."""
_DIGITS = 0.5
"""A change counts if it exceeds this power of the machine precision, relative to the gradient: few digits are left then."""


def beyond_rounding(
    found: list[Difference], wanted: Outcome, root: nn.Module, run: Callable[[], Outcome]
) -> list[Difference]:
    """Return the differences beyond rounding errors. `run` makes `wanted` again, with the current parameters."""
    if not any(_is_comparable(item, wanted) for item in found):
        return found
    noise: dict[str, float] = {}
    for index in range(_TRIES):
        with _changed(root, index):
            moved = run()
        for item in found:
            if _is_comparable(item, wanted):
                noise[item.name] = max(noise.get(item.name, 0.0), _moved(moved, wanted, item.name))
    return [item for item in found if item.worst > _MARGIN * noise.get(item.name, 0.0)]


def _is_comparable(item: Difference, wanted: Outcome) -> bool:
    gradient = (wanted.gradients or {}).get(item.name)
    return item.kind == "gradient of" and item.worst < _INF and gradient is not None


def _moved(moved: Outcome, wanted: Outcome, name: str) -> float:
    """Return the change of a gradient; 0 if most of its digits are unchanged."""
    after, before = (moved.gradients or {}).get(name), (wanted.gradients or {})[name]
    if after is None or before is None or after.shape != before.shape or not before.is_floating_point():
        return 0.0
    worst, scale = _distance(after, before)
    few = worst > float(torch.finfo(before.dtype).eps) ** _DIGITS * scale
    return worst if few and worst < _INF else 0.0


@contextmanager
def _changed(root: nn.Module, seed: int) -> Iterator[None]:
    """Change the parameters a little inside the context, in a way that autograd does not see."""
    generator = torch.Generator().manual_seed(seed)
    own = [p.data for p in root.parameters() if p.is_floating_point() and p.layout == torch.strided and p.numel()]
    before = [tensor.clone() for tensor in own]
    try:
        for tensor in own:
            signs = torch.randint(0, 2, tensor.shape, generator=generator).mul_(2).sub_(1).to(tensor)
            tensor.mul_(signs.mul_(float(torch.finfo(tensor.dtype).eps) ** _STEP).add_(1.0))
        yield
    finally:
        for tensor, value in zip(own, before):
            tensor.copy_(value)
