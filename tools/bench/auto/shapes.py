"""Shapes, run on real processes: plain DDP, and pipelines as asked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.auto.models import build

__all__ = ["Measured", "Shape", "shapes_for", "side_by_side"]


@dataclass(frozen=True)
class Shape:
    """A row of the table. ``microbatches`` counts for one replica."""

    name: str
    stages: int
    replicas: int
    microbatches: int | str = "auto"
    schedule: str = "auto"
    chunks: int | str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "stages": self.stages,
            "replicas": self.replicas,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "chunks": self.chunks,
        }


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


def side_by_side(
    rank: int, size: int, model: str, batch: int, shapes: list[Shape], plan_json: str, steps: int, rounds: int
) -> dict[str, Measured]:
    """Seconds of a step of plain DDP and of every shape; all live in the same processes and take turns.

    ``batch`` is the batch of all replicas together; ``plan_json`` is what the shape "auto" runs.
    """
    contenders = {"plain DDP": _ddp(model, batch, size)}
    for shape in shapes:
        contenders[shape.name] = _pipeline(model, batch, shape, plan_json if shape.name == "auto" else None)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            times[name] += _timed(contender, steps, 1 if number else 3)
    return {name: _told(contenders[name], found) for name, found in times.items()}


@dataclass(frozen=True)
class _Contender:
    step: Callable[[], object]
    parameters: list[torch.nn.Parameter]
    predicted: float
    what: str


def _pipeline(model: str, batch: int, shape: Shape, plan_json: str | None) -> _Contender:
    from pipepart import Pipeline, Plan

    module, example = build(model, batch // shape.replicas)
    options = shape.options if plan_json is None else {"plan": Plan.from_json(plan_json)}
    pipe = Pipeline(module, example, **options)
    plan = pipe.plan
    what = f"{plan.replicas} x {plan.stages} {plan.schedule} m={plan.microbatches} v={plan.chunks_per_stage}"
    return _Contender(lambda: pipe.step(*example), list(pipe.parameters()), plan.step_time, what)


def _ddp(model: str, batch: int, size: int) -> _Contender:
    """Torch's own DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    module, example = build(model, batch // size)
    module(*example).backward()
    idle = any(p.requires_grad and p.grad is None for p in module.parameters())  # as with experts that nobody chose
    wrapped = DistributedDataParallel(module, find_unused_parameters=idle or _may_be_idle(module))
    return _Contender(lambda: wrapped(*example).backward(), list(module.parameters()), 0.0, f"{size} x 1 torch DDP")


def _may_be_idle(module: torch.nn.Module) -> bool:
    """Models that choose their experts by the data use others with every batch."""
    return any("expert" in name for name, _ in module.named_parameters())


def _timed(contender: _Contender, steps: int, warm: int) -> list[float]:
    """Steps that start together on all ranks; the first ones warm up."""
    times = []
    for _ in range(steps + warm):
        for parameter in contender.parameters:
            parameter.grad = None
        dist.barrier()
        started = time.perf_counter()
        contender.step()
        dist.barrier()
        times.append(time.perf_counter() - started)
    return times[warm:]


def _told(contender: _Contender, times: list[float]) -> Measured:
    quarters = statistics.quantiles(times, n=4)
    middle = statistics.median(times)
    return Measured(contender.predicted, middle, (quarters[2] - quarters[0]) / 2 / middle, contender.what)
