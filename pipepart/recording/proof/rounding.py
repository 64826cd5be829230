"""Rounding errors of gradients: gradients that cancel to nothing consist of them, and no two orders of sums agree on them.

The bias before a batch norm and the last bias below a loss that looks at distances have such gradients. How large they
are is measured: the parameters are changed a little, and such gradients take other values of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn

from pipepart.recording.proof.outcome import Difference, Outcome, distance

__all__ = ["beyond_rounding"]

_TRIES = 3
_STEP = 0.75
"""Parameters are changed by this power of the machine's precision, relative to their size."""
_MARGIN = 16.0
"""Gradients are the same if they differ by no more than so many times their own change."""
_DIGITS = 0.5
"""A change counts if it is larger than this power of the precision, relative to the gradient: few digits are left then."""


def beyond_rounding(
    found: list[Difference], wanted: Outcome, root: nn.Module, run: Callable[[], Outcome]
) -> list[Difference]:
    """The differences that are no rounding errors. `run` gives `wanted` again, for the parameters as they are then."""
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
    return item.kind == "gradient of" and item.worst < float("inf") and gradient is not None


def _moved(moved: Outcome, wanted: Outcome, name: str) -> float:
    """By how much a gradient moved, if that is so much that few of its digits are left."""
    after, before = (moved.gradients or {}).get(name), (wanted.gradients or {})[name]
    if after is None or before is None or after.shape != before.shape or not before.is_floating_point():
        return 0.0
    worst, scale = distance(after, before)
    few = worst > float(torch.finfo(before.dtype).eps) ** _DIGITS * scale
    return worst if few and worst < float("inf") else 0.0


@contextmanager
def _changed(root: nn.Module, seed: int) -> Iterator[None]:
    """The parameters are a little off inside; autograd is not told."""
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
