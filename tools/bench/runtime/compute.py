"""Real compute on 2 processes: everything auto, against torch.distributed.pipelining (even split, and the best of all
splits that it can be given), plain data parallel training, and one process.

All of them live in the same two processes and take turns, so that a slow minute of the machine hits all alike.
Efficiency is T(one process) / (2 T): 1 would be two processes that never wait. The machine's own ceiling is that of two
independent processes at once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.runtime.models import MODELS, Chain
from tools.bench.runtime.processes import on_ranks

__all__ = ["Step", "compute", "data_parallel", "ours", "single", "timed", "upstream"]

MICROBATCHES = 8
SAMPLES = 32

Step = Callable[[], Any]


def _maybe_compiled(module: Any, backend: str | None) -> Any:
    return module if backend is None else torch.compile(module, backend=backend)


def single(name: str, backend: str | None = None) -> Step:
    """One process with the same micro-batches."""
    torch.manual_seed(0)
    whole = MODELS[name]()
    model = _maybe_compiled(whole, backend)
    batch = MODELS[name].batch(SAMPLES)

    def step() -> None:
        for part in zip(*(tensor.chunk(MICROBATCHES) for tensor in batch)):
            (model(*part) / MICROBATCHES).backward()
        whole.zero_grad()

    return step


def data_parallel(name: str, size: int, backend: str | None = None) -> Step:
    """Each process has its share of the batch, in micro-batches of the same size."""
    torch.manual_seed(0)
    whole = torch.nn.parallel.DistributedDataParallel(MODELS[name]())
    model = _maybe_compiled(whole, backend)
    batch = MODELS[name].batch(SAMPLES // size)

    def step() -> None:
        *first, last = zip(*(tensor.chunk(MICROBATCHES // size) for tensor in batch))
        with whole.no_sync():
            for part in first:
                (model(*part) / (len(first) + 1)).backward()
        (model(*last) / (len(first) + 1)).backward()
        whole.zero_grad()

    return step


def ours(name: str, size: int, backend: str | None = None, plan: Any = None) -> tuple[Step, Any]:
    from pipepart import Pipeline

    torch.manual_seed(0)
    batch = MODELS[name].batch(SAMPLES)
    shape: Any = {"plan": plan} if plan is not None else {"stages": size, "microbatches": MICROBATCHES}
    compile: Any = {"backend": backend} if backend is not None else False
    pipe = Pipeline(MODELS[name](), batch, compile=compile, timeout=1800.0, **shape)

    def step() -> None:
        pipe.step(*batch)
        for parameter in pipe.parameters():
            parameter.grad = None

    return step, pipe


def upstream(name: str, rank: int, size: int, cut: int, backend: str | None = None) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    whole = MODELS[name]()
    parts = whole.parts()
    module = Chain(parts[:cut] if rank == 0 else parts[cut:])
    if backend is not None:
        module.compile(backend=backend)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    runner = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=whole.loss)
    batch = MODELS[name].batch(SAMPLES)

    def step() -> None:
        if rank == 0:
            runner.step(batch[0])
        else:
            runner.step(target=batch[1])
        module.zero_grad()

    return step


def timed(step: Step, steps: int, warm: int) -> list[float]:
    times = []
    for _ in range(steps + warm):
        dist.barrier()
        started = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - started)
    return times[warm:]


def _cost_of_tracing(pipe: Any, step: Step, pairs: int) -> float:
    """How much longer a traced step is than its neighbour without, as a part: the median over many pairs."""
    found = []
    for index in range(pairs):
        seconds = {}
        for on in (False, True) if index % 2 else (True, False):
            with pipe.tracing() if on else nullcontext():
                (seconds[on],) = timed(step, 1, 0)
        found.append(seconds[True] / seconds[False] - 1)
    return statistics.median(found)


def _work_of_tracing(pipe: Any, rounds: int = 20) -> float:
    """Seconds that the marks of a step and leaving them for others take by themselves."""
    from pipepart.runtime.tracing import Trace, TraceBoard

    actions = [event.action for event in pipe.trace.events if event.stage == pipe.stage]
    board = TraceBoard(pipe.plan.stages, pipe._runtime.groups, 60.0)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        trace = Trace(pipe.stage, torch.device("cpu"))
        for action in actions:
            trace.add(action, trace.now())
        board.post(trace)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _measure(rank: int, size: int, name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Medians in seconds of everything on one model."""
    alone = single(name)
    mine, pipe = ours(name, size)
    parts = len(MODELS[name]().parts())
    cuts = {cut: upstream(name, rank, size, cut) for cut in range(1, parts)}
    looks = {cut: torch.tensor(statistics.median(timed(step, 4, 2))) for cut, step in cuts.items()}
    for seconds in looks.values():
        dist.broadcast(seconds, 0)  # both must take the same one
    best = min(looks, key=lambda cut: float(looks[cut]))
    contenders: dict[str, Step] = {
        "one": alone if rank == 0 else lambda: None,
        "two": alone,
        "ours": mine,
        "even": cuts[parts // 2],
        "best": cuts[best],
        "ddp": data_parallel(name, size),
    }
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for index in range(rounds):
        for key, step in contenders.items():
            times[key] += timed(step, steps, 1 if index else 3)
    result: dict[str, Any] = {key: statistics.median(found) for key, found in times.items()}
    tracing = _cost_of_tracing(pipe, mine, 5 * rounds * steps)
    busy = pipe.trace.busy
    result.update(plan=f"{pipe.plan.schedule}, slack {pipe.plan.slack}", predicted=pipe.plan.step_time, best_cut=best)
    result.update(busy=max(busy), tracing=tracing, tracing_work=_work_of_tracing(pipe))
    result["bubble"] = pipe.plan.bubble
    return result


def compute(steps: int = 4, rounds: int = 4, names: tuple[str, ...] = tuple(MODELS)) -> str:
    """The table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = [
        f"{'':>9} {'--------- efficiency: T(one process) / 2 T ---------':^54}  {'times faster than':^20}",
        f"{'model':>9} {'ceiling':>8} {'pipepart':>9} {'of limit':>9} {'up. even':>9} {'up. best':>9} {'ddp':>6}"
        f"  {'even':>6} {'best':>6} {'ddp':>6}  plan",
    ]
    print("\n".join(lines), flush=True)
    for name in names:
        found = on_ranks(2, _measure, name, steps, rounds, timeout=900)[0]
        ceiling = found["one"] / found["two"]
        share = {key: found["one"] / (2 * found[key]) for key in ("ours", "even", "best", "ddp")}
        limit = (1 - found["bubble"]) * ceiling
        ratios = " ".join(f"{found[key] / found['ours']:6.2f}" for key in ("even", "best", "ddp"))
        lines.append(
            f"{name:>9} {ceiling:8.2f} {share['ours']:9.2f} {share['ours'] / limit:9.0%} {share['even']:9.2f} "
            f"{share['best']:9.2f} {share['ddp']:6.2f}  {ratios}  {found['plan']}; predicted "
            f"{found['predicted'] / found['ours'] - 1:+.0%}; tracing {found['tracing']:+.1%} "
            f"(its own work {found['tracing_work'] / found['ours']:.2%})"
        )
        print(lines[-1], flush=True)
    lines.append(
        "upstream trains the tied model with wrong gradients; the U-Net's skips were threaded through its stages by hand"
    )
    print(lines[-1], flush=True)
    return "\n".join(lines)
