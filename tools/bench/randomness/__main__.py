"""`python -m tools.bench.randomness [steps]`: what `randomness="op"` costs, on models with dropout in every block.

Steps with and without it take turns in one process, and the time is that of the processor, so that a busy machine does
not count. The overhead of a step with 8 micro-batches is that of seeding a generator before each draw.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from pipepart import Pipeline
from tools.bench.runtime.models import GPT, ResNet

MICROBATCHES, SAMPLES = 8, 32


def with_dropout(name: str) -> nn.Module:
    model: Any = {"GPT": GPT, "ResNet": ResNet}[name]()
    for index, block in enumerate(model.blocks):
        if name == "GPT":  # after attention and after the layers, as usual
            block.out, block.mlp = nn.Sequential(block.out, nn.Dropout(0.1)), nn.Sequential(block.mlp, nn.Dropout(0.1))
        else:
            model.blocks[index] = nn.Sequential(block, nn.Dropout(0.1))
    return model


def overhead(name: str, steps: int) -> tuple[float, float]:
    """Seconds of the processor for a step by `stage`, and by `op`."""
    times: dict[str, list[float]] = {"stage": [], "op": []}
    pipes = {}
    for randomness in times:
        torch.manual_seed(0)
        model = with_dropout(name)
        batch = model.batch(SAMPLES)
        options: Any = {"stages": 1, "microbatches": MICROBATCHES, "schedule": "gpipe", "randomness": randomness}
        pipes[randomness] = Pipeline(model, batch, **options)
    for step in range(steps + 2):
        for randomness in list(times) if step % 2 else list(times)[::-1]:
            started = time.process_time()
            pipes[randomness].step(*batch)
            if step >= 2:
                times[randomness].append(time.process_time() - started)
    return statistics.median(times["stage"]), statistics.median(times["op"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    for kind in ("GPT", "ResNet"):
        stage, op = overhead(kind, count)
        print(
            f"{kind:7} stage {1e3 * stage:8.2f} ms   op {1e3 * op:8.2f} ms   {100 * (op / stage - 1):+.2f} %",
            flush=True,
        )
