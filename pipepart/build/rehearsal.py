"""The rehearsal: steps of the real pipeline before training, to measure the time of a step.

Costs of ops select the partition and the schedule. They do not include delays of a whole step: cold caches after an
optimizer step, waits for a late neighbour, the start and the end of a step. Steps of the planned pipeline include them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch

from pipepart.cost import state_kept
from pipepart.devices import computes_on_host, synchronize
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object
from pipepart.runtime.program import StepRequest
from pipepart.runtime.stage import StageRuntime

__all__ = ["rehearsed"]

_FIRST = 3  # steps that announce shapes and fill caches; the last of them determines the number of further steps
_STEPS = (3, 60)  # further steps: at least, at most
_BUDGET = 2.0  # seconds
_BETWEEN_STEPS = 24 * 2**20  # bytes of caches that code between two steps uses, as measured


def rehearsed(runtime: StageRuntime, request: StepRequest, name: str) -> float:
    """Return the seconds of the training step `name`, equal on all ranks.

    Every rank must call it. Parameters, buffers, gradients and random states do not change.
    """
    with state_kept(runtime.root):
        first = [_step(runtime, request, name) for _ in range(_FIRST)]
        least, most = _STEPS
        count = _from_rank_zero(runtime, min(most, max(least, int(_BUDGET / max(first[-1], 1e-6)))))
        steps = [_step(runtime, request, name) for _ in range(int(count))]
        seconds = statistics.median(steps[len(steps) // 3 :])  # allocators need some more steps to become steady
    return _from_rank_zero(runtime, seconds)


def _step(runtime: StageRuntime, request: StepRequest, name: str) -> float:
    synchronize(runtime.device)
    started = time.perf_counter()
    runtime.train(request, name)
    synchronize(runtime.device)
    seconds = time.perf_counter() - started
    _as_between_steps(runtime.parameters.take_gradients().values(), runtime.device)
    return seconds


@torch.no_grad()
def _as_between_steps(gradients: Iterable[torch.Tensor], device: torch.device) -> None:
    """Use the caches as code between two steps does: an optimizer and the hooks of a trainer.

    After that, a step of a small model takes 25 % longer than directly after another step.
    """
    if computes_on_host(device):
        torch.ones(_BETWEEN_STEPS // 4)
    for gradient in gradients:
        first, second = gradient * 0.1, gradient * gradient
        first.addcdiv_(first, second.sqrt_().add_(1.0))


def _from_rank_zero(runtime: StageRuntime, value: float) -> float:
    if runtime.groups is None:
        return value
    with guarded(runtime.groups):
        return float(broadcast_object(value, 0, runtime.groups))
