"""Stages that sleep: what share of its own limit does a schedule reach, here and in torch.distributed.pipelining?"""

from __future__ import annotations

import statistics
import time
from typing import Any

from tools.bench.runtime.models import SleepLayer, Sleepy
from tools.bench.runtime.processes import on_ranks

__all__ = ["sleeping"]

FORWARD = 0.010


def alone(rank: int, size: int, chunks: int, rounds: int = 30) -> tuple[float, float]:
    """Median seconds of the forward and the backward of one sleeping chunk in a process of its own.

    That is a quarter of a millisecond more than it was told to sleep: calling a function of autograd after a sleep.
    """
    import torch

    layer = SleepLayer(FORWARD / chunks)
    forward, backward = [], []
    for _ in range(rounds):
        x = torch.randn(2, 256, requires_grad=True)
        time.sleep(0.002)
        began = time.perf_counter()
        y = layer(x)
        between = time.perf_counter()
        torch.autograd.backward([y], [torch.ones_like(y)])
        forward.append(between - began)
        backward.append(time.perf_counter() - between)
    return statistics.median(forward), statistics.median(backward)


def limit(schedule: str, stages: int, microbatches: int, chunks: int, forward: float, backward: float) -> float:
    """Seconds of the step if nothing but the chunks took time: the simulator's figure for equal stages."""
    from pipepart.schedule import ChunkCosts, make_schedule, step_time

    half = backward * chunks / 2
    costs = ChunkCosts.even(stages, chunks, forward=forward * chunks, backward_input=half, backward_weight=half)
    return step_time(make_schedule(schedule, stages=stages, microbatches=microbatches, chunks=chunks), costs)


def ours(rank: int, size: int, schedule: str, microbatches: int, chunks: int, steps: int) -> list[float]:
    import torch.distributed as dist

    from pipepart import Pipeline

    model = Sleepy(size * chunks, FORWARD / chunks)
    cuts = [f"layers.{i}" for i in range(1, size * chunks)]
    pipe = Pipeline(
        model, Sleepy.batch(microbatches * 2), stages=size, microbatches=microbatches, schedule=schedule, chunks=chunks,
        slack=0, split_at=cuts,
    )  # fmt: skip
    batch = Sleepy.batch(microbatches * 2)
    times = []
    for _ in range(steps + 2):
        dist.barrier()
        started = time.perf_counter()
        pipe.step(*batch)
        dist.barrier()
        times.append(time.perf_counter() - started)
    return times[2:]


def upstream(rank: int, size: int, schedule: str, microbatches: int, chunks: int, steps: int) -> list[float]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    batch = Sleepy.batch(microbatches * 2)
    stages = []
    for chunk in range(chunks):
        index = rank + chunk * size
        layer = SleepLayer(FORWARD / chunks)
        stages.append(PipelineStage(layer, index, size * chunks, torch.device("cpu")))
    kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    runner = kinds[schedule](stages if chunks > 1 else stages[0], n_microbatches=microbatches, loss_fn=F.mse_loss)
    times = []
    for _ in range(steps + 2):
        dist.barrier()
        started = time.perf_counter()
        arguments = (batch[0],) if rank == 0 else ()
        target = {"target": batch[1]} if rank == size - 1 else {}
        runner.step(*arguments, **target)
        dist.barrier()
        times.append(time.perf_counter() - started)
    return times[2:]


def sleeping(sizes: tuple[int, ...] = (4, 8), steps: int = 8, rounds: int = 3) -> str:
    """A table: for each schedule and number of stages the limit, the share that we reach, and the share of upstream.

    Rounds alternate, so that a slow minute of the machine hits both alike.
    """
    lines = [f"{'stages':>6} {'micro':>5} {'schedule':>12} {'limit':>9} {'pipepart':>9} {'upstream':>9}"]
    print(lines[0], flush=True)
    for size in sizes:
        microbatches = 2 * size if size == 4 else 4 * size
        for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
            times: dict[Any, list[float]] = {ours: [], upstream: []}
            limits = []
            for _ in range(rounds):
                limits.append(limit(schedule, size, microbatches, chunks, *on_ranks(1, alone, chunks)[0]))
                for runner in (ours, upstream):
                    times[runner] += on_ranks(size, runner, schedule, microbatches, chunks, steps)[0]
            best = statistics.median(limits)
            shares = [f"{best / statistics.median(times[runner]):9.1%}" for runner in (ours, upstream)]
            lines.append(f"{size:6} {microbatches:5} {schedule:>12} {best * 1e3:6.0f} ms {shares[0]} {shares[1]}")
            print(lines[-1], flush=True)
    return "\n".join(lines)
