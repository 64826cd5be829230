"""One shape, run on real processes: plain DDP, or a pipeline as asked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.auto.models import build

__all__ = ["Measured", "Shape", "ddp", "pipeline", "shapes_for"]


@dataclass(frozen=True)
class Shape:
    """A row of the table. ``microbatches`` counts for one replica."""

    name: str
    stages: int
    replicas: int
    microbatches: int | str = "auto"
    schedule: str = "auto"
    chunks: int | str = "auto"


@dataclass(frozen=True)
class Measured:
    predicted: float
    seconds: float
    spread: float
    """Half the distance between the quartiles, as a part of the median."""
    what: str


def shapes_for(devices: int, microbatches: tuple[int, ...]) -> list[Shape]:
    """Every fixed shape of so many devices: replicas only, pipelines with each schedule, and both."""
    found = [Shape("replicas only", 1, devices, 1, "1f1b")]
    for stages in range(2, devices + 1):
        if devices % stages:
            continue
        for count in microbatches:
            ways: list[tuple[str, int | str]] = [
                ("gpipe", 1),
                ("1f1b", 1),
                ("interleaved", 2),
                ("zb_h1", 1),
                ("zb_v", 2),
            ]
            for schedule, chunks in ways:
                name = f"{devices // stages} x {stages} {schedule} m={count}"
                found.append(Shape(name, stages, devices // stages, count, schedule, chunks))
    return found


def pipeline(rank: int, size: int, model: str, batch: int, shape: Shape, plan_json: str | None, steps: int) -> Measured:
    """Seconds of `Pipeline.step` on this rank. ``batch`` is the batch of all replicas together."""
    from pipepart import Pipeline, Plan

    module, example = build(model, batch // shape.replicas)
    options: dict[str, Any] = {
        "stages": shape.stages,
        "replicas": shape.replicas,
        "microbatches": shape.microbatches,
        "schedule": shape.schedule,
        "chunks": shape.chunks,
    }
    if plan_json is not None:
        options = {"plan": Plan.from_json(plan_json)}
    pipe = Pipeline(module, example, **options)
    seconds, spread = _timed(lambda: pipe.step(*example), list(pipe.parameters()), steps)
    plan = pipe.plan
    what = f"{plan.replicas} x {plan.stages} {plan.schedule} m={plan.microbatches} v={plan.chunks_per_stage}"
    return Measured(plan.step_time, seconds, spread, what)


def ddp(rank: int, size: int, model: str, batch: int, steps: int) -> Measured:
    """Seconds of a step under torch's own DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    module, example = build(model, batch // size)
    wrapped = DistributedDataParallel(module)

    def step() -> None:
        wrapped(*example).backward()

    seconds, spread = _timed(step, list(module.parameters()), steps)
    return Measured(0.0, seconds, spread, f"{size} x 1 torch DDP")


def _timed(step: Callable[[], object], parameters: list[torch.nn.Parameter], steps: int) -> tuple[float, float]:
    """Median and spread over steps that start together on all ranks; the first ones warm up."""
    times = []
    for _ in range(steps + 3):
        for parameter in parameters:
            parameter.grad = None
        dist.barrier()
        started = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - started)
    quarters = statistics.quantiles(times[3:], n=4)
    middle = statistics.median(times[3:])
    return middle, (quarters[2] - quarters[0]) / 2 / middle
