"""The figures of one stage for a whole head and for a head in slices."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from tools.bench.auto.memory import peak_of
from tools.bench.runtime.models import GPT

__all__ = ["measure"]


def measure(rank: int, size: int, arguments: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The figures of this stage for each form."""
    from pipepart import Pipeline

    pipes = {}
    shape = (arguments["samples"], arguments["context"])
    x = torch.randint(0, arguments["vocabulary"], shape, generator=torch.Generator().manual_seed(0))
    batch = x, x.roll(-1, 1)
    for head in ("whole", "sliced"):
        torch.manual_seed(0)
        model = GPT(arguments["vocabulary"], arguments["width"], context=arguments["context"], tied=arguments["tied"])
        pipes[head] = Pipeline(
            model,
            batch,
            stages=size,
            microbatches=arguments["microbatches"],
            schedule=arguments["schedule"],
            head=head if head == "whole" or not arguments["slice"] else {"slice": arguments["slice"]},
        )
    seconds: dict[str, list[float]] = {head: [] for head in pipes}
    losses: dict[str, float] = {}
    for step in range(arguments["steps"] + 2):
        for head in list(pipes) if step % 2 else list(pipes)[::-1]:
            for parameter in pipes[head].parameters():
                parameter.grad = None
            started = time.perf_counter()
            losses[head] = float(pipes[head].step(*batch))
            if step >= 2:
                seconds[head].append(time.perf_counter() - started)
    found = {}
    for head, pipe in pipes.items():
        peaks = []
        for _ in range(2):
            for parameter in pipe.parameters():
                parameter.grad = None
            peaks.append(peak_of(lambda pipe=pipe: pipe.step(*batch)))
        told = pipe.plan.memory[pipe.stage]
        found[head] = {
            "loss": losses[head],
            "seconds": statistics.median(seconds[head]),
            "predicted": pipe.plan.step_time,
            "peak": max(peaks),
            "told": told.gradients + told.activations + told.scratch,
            "slice": pipe.plan.head,
        }
    return found
