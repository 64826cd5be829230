"""Real compute on 2 processes: everything auto, against torch.distributed.pipelining with the even and with its best split.

Efficiency is T(one process) / (2 T): 1 would be two processes that never wait. The limit of the schedule and the
machine's own ceiling (two independent processes at once) are measured in the same run.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from torch import nn

from tools.bench.runtime.models import MODELS
from tools.bench.runtime.processes import on_ranks

__all__ = ["compute"]

MICROBATCHES = 8
SAMPLES = 32


def _timed(step: Any, steps: int) -> list[float]:
    import torch.distributed as dist

    times = []
    for _ in range(steps + 3):
        dist.barrier()
        started = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - started)
    return times[3:]


def single(rank: int, size: int, name: str, steps: int) -> list[float]:
    """One process with the same micro-batches; on two ranks at once it shows what the machine has for both."""
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = MODELS[name].batch(SAMPLES)

    def step() -> None:
        for part in zip(*(tensor.chunk(MICROBATCHES) for tensor in batch)):
            (model(*part) / MICROBATCHES).backward()
        model.zero_grad()

    return _timed(step, steps)


def ours(rank: int, size: int, name: str, steps: int) -> tuple[list[float], str, float]:
    from pipepart import Pipeline

    torch.manual_seed(0)
    model = MODELS[name]()
    batch = MODELS[name].batch(SAMPLES)
    pipe = Pipeline(model, batch, stages=size, microbatches=MICROBATCHES)

    def step() -> None:
        pipe.step(*batch)
        for parameter in pipe.parameters():
            parameter.grad = None

    plan = pipe.plan
    return _timed(step, steps), f"{plan.schedule}, slack {plan.slack}", plan.step_time


def upstream(rank: int, size: int, name: str, steps: int, cut: int) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    whole = MODELS[name]()
    parts = whole.parts()
    module = nn.Sequential(*(parts[:cut] if rank == 0 else parts[cut:]))
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    runner = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=whole.loss)
    batch = MODELS[name].batch(SAMPLES)

    def step() -> None:
        if rank == 0:
            runner.step(batch[0])
        else:
            runner.step(target=batch[1])
        module.zero_grad()

    return _timed(step, steps)


def compute(steps: int = 12, rounds: int = 3) -> str:
    """The table. Rounds are interleaved, so that a slow minute of the machine hits all alike."""
    head = f"{'model':>8} {'ceiling':>8} {'pipepart':>9} {'up. even':>9} {'up. best':>9}  {'of limit':>8}  plan"
    lines = [head]
    limit = MICROBATCHES / (MICROBATCHES + 1)
    for name, kind in MODELS.items():
        parts = len(kind().parts())
        times: dict[Any, list[float]] = {}
        chosen = ""
        for _ in range(rounds):
            times.setdefault("one", []).extend(on_ranks(1, single, name, steps)[0])
            times.setdefault("two", []).extend(on_ranks(2, single, name, steps)[0])
            found, chosen, _ = on_ranks(2, ours, name, steps)[0]
            times.setdefault("ours", []).extend(found)
            for cut in range(1, parts):
                times.setdefault(cut, []).extend(on_ranks(2, upstream, name, steps, cut)[0])
        median = {key: statistics.median(values) for key, values in times.items()}
        best = min(median[cut] for cut in range(1, parts))
        ceiling = median["one"] / median["two"]

        def share(seconds: float, one: float = median["one"]) -> float:
            return one / (2 * seconds)

        reached = share(median["ours"]) / (limit * ceiling)
        lines.append(
            f"{name:>8} {ceiling:8.2f} {share(median['ours']):9.2f} {share(median[parts // 2]):9.2f} {share(best):9.2f}"
            f"  {reached:8.0%}  {chosen}; {median[parts // 2] / median['ours']:.2f} x upstream even, "
            f"{best / median['ours']:.2f} x upstream best"
        )
        print(lines[-1], flush=True)
    return "\n".join(
        itertools.chain(lines, [f"limit of 1F1B with {MICROBATCHES} micro-batches on 2 stages: {limit:.3f}"])
    )
