"""Predicted peak memory of every stage against what its process really allocates in a step with Adam.

The allocations of a step are those that the CPU allocator of torch reports: activations, gradients, messages and all
that comes and goes in between. What stays (weights, optimizer state, the batch on the first stage) is counted tensor by tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tools.bench.auto.models import build
from tools.bench.runtime.processes import on_ranks

__all__ = ["memory", "peak_of"]

_SHAPES: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved"},
    {"schedule": "zb_v"},
    {"schedule": "v_half"},
    {"schedule": "v_min"},
    {"schedule": "1f1b", "recompute": True},
)


def peak_of(step: Any) -> int:
    """The most bytes that are allocated at once while it runs, on top of what there is before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), index, e.nbytes()) for index, e in enumerate(events) if e.name() == "[memory]")
    level = peak = 0
    for _, _, size in changes:
        level += size
        peak = max(peak, level)
    return peak


def _measure(
    rank: int, size: int, model: str, batch: int | None, options: dict[str, Any]
) -> tuple[str, list[int], int]:
    """The plan in a word, the predicted bytes of this stage by what they are for, and the measured ones."""
    from pipepart import Pipeline

    module, example = build(model, batch)
    pipe = Pipeline(module, example, stages=size, microbatches=4 * size, **options)
    parameters = list(pipe.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def step() -> None:
        pipe.step(*example)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    batch_here = example if pipe.stage == 0 else ()
    stays = sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *states, *batch_here))
    peak = max(peak_of(step) for _ in range(2))
    told = pipe.plan.memory[pipe.stage]
    return (
        pipe.plan.schedule,
        [told.weights, told.gradients, told.optimizer, told.activations, told.scratch],
        stays + peak,
    )


def memory(models: tuple[str, ...], batch: int | None = None, devices: int = 2) -> str:
    lines = [
        f"{'model':>10}  {'schedule':22} stage  predicted   measured   error   weights gradients optimizer activations scratch"
    ]
    worst = 0.0
    for model in models:
        for options in _SHAPES:
            name = options["schedule"] + (", recompute" if options.get("recompute") else "")
            for stage, (_, told, real) in enumerate(on_ranks(devices, _measure, model, batch, options)):
                error = sum(told) / real - 1
                worst = max(worst, abs(error))
                parts = " ".join(f"{part / 1e6:9.2f}" for part in told)
                lines.append(
                    f"{model:>10}  {name:22} {stage:5} {sum(told) / 1e6:7.2f} MB {real / 1e6:7.2f} MB {error:+7.1%}  {parts}"
                )
                print(lines[-1], flush=True)
    lines.append(f"largest error {worst:.1%}")
    return "\n".join(lines)
