"""Compiled forms on 2 processes, in turn with those that are not compiled: ours, torch.distributed.pipelining, plain data
parallel training, and one process.

Efficiency is T(one compiled process) / (2 T). The split of upstream is the best one of its stages without the compiler.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.runtime import compute as plain
from tools.bench.runtime.models import MODELS
from tools.bench.runtime.processes import on_ranks

__all__ = ["compiled"]


def _measure(rank: int, size: int, name: str, steps: int, rounds: int, backend: str) -> dict[str, Any]:
    """Medians in seconds of everything on one model."""
    mine, pipe = plain.ours(name, size)
    parts = len(MODELS[name]().parts())
    looks = {}
    for cut in range(1, parts):
        looks[cut] = torch.tensor(statistics.median(plain.timed(plain.upstream(name, rank, size, cut), 4, 2)))
        dist.broadcast(looks[cut], 0)
    best = min(looks, key=lambda cut: float(looks[cut]))
    single, single_compiled = plain.single(name), plain.single(name, backend)
    contenders: dict[str, plain.Step] = {
        "one": single if rank == 0 else lambda: None,
        "one compiled": single_compiled if rank == 0 else lambda: None,
        "two compiled": single_compiled,
        "ours": mine,
        "ours compiled": plain.ours(name, size, backend, pipe.plan)[0],
        "upstream": plain.upstream(name, rank, size, best),
        "upstream compiled": plain.upstream(name, rank, size, best, backend),
        "ddp": plain.data_parallel(name, size),
        "ddp compiled": plain.data_parallel(name, size, backend),
    }
    first: dict[str, float] = {}
    for key, step in contenders.items():
        started = time.perf_counter()
        plain.timed(step, 2, 1)
        first[key] = time.perf_counter() - started
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for _ in range(rounds):
        for key, step in contenders.items():
            times[key] += plain.timed(step, steps, 1)
    result: dict[str, Any] = {key: statistics.median(found) for key, found in times.items()}
    result["seconds to compile"] = first["ours compiled"] - first["ours"]
    return result


def compiled(steps: int = 4, rounds: int = 4, names: tuple[str, ...] = tuple(MODELS), backend: str = "inductor") -> str:
    """The table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kinds = ("ours", "upstream", "ddp")
    lines = [
        f"{'':>9} {'':>8} {'--- efficiency, compiled ---':^29}  {'--- gain by compiling ---':^29}  {'times faster than':^21}",
        f"{'model':>9} {'ceiling':>8} " + " ".join(f"{kind:>9}" for kind in kinds) + "  "
        + " ".join(f"{kind:>9}" for kind in kinds) + f"  {'upstream':>10} {'ddp':>10}  first steps",
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    for name in names:
        found = on_ranks(2, _measure, name, steps, rounds, backend, timeout=3600)[0]
        fast = {kind: found[f"{kind} compiled"] for kind in kinds}
        shares = " ".join(f"{found['one compiled'] / (2 * fast[kind]):9.2f}" for kind in kinds)
        gains = " ".join(f"{found[kind] / fast[kind]:9.2f}" for kind in kinds)
        ratios = " ".join(f"{fast[kind] / fast['ours']:10.2f}" for kind in kinds[1:])
        ceiling = found["one compiled"] / found["two compiled"]
        lines.append(
            f"{name:>9} {ceiling:8.2f} {shares}  {gains}  {ratios}  {found['seconds to compile']:.1f} s more with the compiler"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)
