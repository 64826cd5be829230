"""A rehearsal: some steps of the real pipeline before the first one counts, to see what a step really takes.

The costs of the ops say which split and which schedule are best. What they cannot know is what stages do to each other
when they run: caches that are cold after an optimizer step, waits for a neighbour that was late, the way in and out of
a step. A few steps of the plan itself have all of that in them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pipepart.cost import state_kept
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object
from pipepart.runtime.stage import StageRuntime

__all__ = ["rehearsed"]

_FIRST = 3  # the first steps announce shapes and fill caches; their last one tells how many more there is time for
_STEPS = (3, 60)  # after these: at least, at most
_BUDGET = 2.0  # seconds
_BETWEEN_STEPS = 24 * 2**20  # bytes that what happens between two steps takes of the caches, as measured


def rehearsed(runtime: StageRuntime, leaves: Sequence[Any] | None, **options: Any) -> float:
    """Seconds of a step, the same figure on every rank. `options` are those of `StageRuntime.train`.

    Every rank must call it. Buffers, gradients and random states are as before; no parameter changes.
    """
    with state_kept(runtime.root):
        first = [_step(runtime, leaves, options) for _ in range(_FIRST)]
        least, most = _STEPS
        count = _from_rank_zero(runtime, min(most, max(least, int(_BUDGET / max(first[-1], 1e-6)))))
        steps = [_step(runtime, leaves, options) for _ in range(int(count))]
        seconds = statistics.median(steps[len(steps) // 3 :])  # allocators settle for some more steps
    return _from_rank_zero(runtime, seconds)


def _step(runtime: StageRuntime, leaves: Sequence[Any] | None, options: dict[str, Any]) -> float:
    started = time.perf_counter()
    runtime.train(leaves, **options)
    seconds = time.perf_counter() - started
    _as_between_steps(runtime.parameters.take_gradients().values(), runtime.device)
    return seconds


@torch.no_grad()
def _as_between_steps(gradients: Iterable[torch.Tensor], device: torch.device) -> None:
    """Leave the caches as a run does: an optimizer has gone through its state, and a trainer has run its hooks.

    A step of a small model takes a quarter longer after that than right after another step.
    """
    if device.type == "cpu":
        torch.ones(_BETWEEN_STEPS // 4)
    for gradient in gradients:
        first, second = gradient * 0.1, gradient * gradient
        first.addcdiv_(first, second.sqrt_().add_(1.0))


def _from_rank_zero(runtime: StageRuntime, value: float) -> float:
    if runtime.groups is None:
        return value
    with guarded(runtime.groups):
        return float(broadcast_object(value, 0, runtime.groups))
