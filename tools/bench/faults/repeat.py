"""Break jobs in every way, and look at how they end."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tools.bench.faults.job import CAUSE, Fault, rank_main

__all__ = ["maker_of", "once", "repeat"]

ALLOWED = 10.0  # seconds from the fault to the end of every rank; for a stopped one the time limit comes on top
STOP_LIMIT = 5.0  # seconds: the time limit of jobs with a stopped rank, short so that many can be tried
HANG = 60.0
_BETWEEN = (
    ("gradients", "mean"),
    ("gradients", "sharded"),
    ("parameters", "sharded"),
    ("gradients", "fsdp"),
    ("parameters", "fsdp"),
    ("parameters", "master"),
    ("parameters", "local"),
    ("parameters", "ring"),
)
"""Exchanges between replicas, and the modes in which they are tried."""


def repeat(repetitions: int = 100) -> tuple[str, bool]:
    """The table, and whether every job ended in time with its cause named and nothing left behind."""
    places = ("forward", "backward", "communication")
    ways = ("raise", "kill", "stop")
    cases = [(*case, "mean") for case in itertools.product(ways, places, (2, 4), ("shared_memory", "group"))]
    cases += [(how, where, 4, "group", sync) for how in ways for where, sync in _BETWEEN]
    chance = random.Random(0)
    slowest: dict[tuple[str, str, int, str, str], list[float]] = defaultdict(list)
    wrong: list[str] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pipepart"])
    for number, (how, where, ranks, transport, sync) in zip(range(repetitions), itertools.cycle(cases)):
        limit = STOP_LIMIT if how == "stop" else 60.0
        fault = Fault(where, how, chance.randrange(ranks), ranks, transport, limit, sync)
        took, problems = once(context, fault)
        slowest[how, where, ranks, transport, sync].append(took)
        wrong += [f"{number}: {fault}: {problem}" for problem in problems]
        what = f"{how:6} in {where:14} rank {fault.rank} of {ranks} {transport:14} {sync:8}"
        print(f"{number + 1:4} {what} {took:5.1f} s {'; '.join(problems)}", flush=True)
    lines = [f"{'fault':6} {'where':14} {'ranks':>5} {'transport':14} {'sync':8} {'times':>5} {'slowest end':>11}"]
    for (how, where, ranks, transport, sync), times in sorted(slowest.items()):
        lines.append(f"{how:6} {where:14} {ranks:5} {transport:14} {sync:8} {len(times):5} {max(times):9.1f} s")
    lines.append(
        f"{repetitions} jobs, {len(wrong)} problems; a stopped rank is found by the time limit of {STOP_LIMIT:.0f} s"
    )
    return "\n".join([*lines, *wrong]), not wrong


def once(
    context: multiprocessing.context.ForkServerContext, fault: Fault, in_time: bool = True
) -> tuple[float, list[str]]:
    """Seconds from the fault to the end of the last rank that can end, and all that was not as it should be."""
    before = _shared_memory(set())
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_main, args=(rank, folder, fault), daemon=True) for rank in range(fault.ranks)
        ]
        for process in processes:
            process.start()
        expected = [p for rank, p in enumerate(processes) if fault.how != "stop" or rank != fault.rank]
        deadline = time.monotonic() + HANG
        for process in expected:
            process.join(max(0.0, deadline - time.monotonic()))
        ended = time.time()
        problems = [f"rank {rank} hangs" for rank, p in enumerate(processes) if p in expected and p.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        try:
            took = ended - float(Path(folder, "struck").read_text())
        except (OSError, ValueError):
            took = HANG
            problems.append("the fault was never reached")
        said = {
            r: Path(folder, f"said-{r}").read_text() for r in range(fault.ranks) if Path(folder, f"said-{r}").exists()
        }
        problems += _not_said(fault, said)
    if in_time and took > ALLOWED + (fault.limit if fault.how == "stop" else 0):
        problems.append(f"took {took:.1f} s")
    if left := _shared_memory({process.pid for process in processes}) - before:
        problems.append(f"left in shared memory: {sorted(left)}")
    return took, problems


def _not_said(fault: Fault, said: dict[int, str]) -> list[str]:
    """Every rank that lives must say why it ended: the exception of another, the rank that is gone, or who waits for whom."""
    problems = []
    for rank in range(fault.ranks):
        text = said.get(rank)
        if rank == fault.rank and fault.how != "raise":
            continue
        if text is None:
            problems.append(f"rank {rank} said nothing")
        elif fault.how == "raise" and CAUSE not in text:
            problems.append(f"rank {rank} does not name the cause: {text.strip().splitlines()[-1]}")
        elif (
            fault.how == "stop"
            and f"no report from rank {fault.rank}" not in text
            and "another rank failed first" not in text
        ):
            problems.append(f"rank {rank} does not name the stopped rank: {text.strip().splitlines()[-1]}")
        elif fault.how == "kill" and "lost another rank" not in text:
            problems.append(f"rank {rank} does not say that a rank is lost: {text.strip().splitlines()[-1]}")
    return problems


def _shared_memory(own: set[int | None]) -> set[str]:
    """Names there, without the semaphores of `multiprocessing`, which its own tracker removes.

    Folders and files of pipepart and torch have the number of a process in their names; only those of the processes in
    `own` count, since other jobs run on this host at the same time, and some of them are killed on purpose.
    """
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.mp-") and maker_of(name) in {None, *own}}


def maker_of(name: str) -> int | None:
    """Return the number of the process that made a folder or file in shared memory, None if its name does not say it."""
    found = re.match(r"(?:pipepart-[a-z]+-|torch_)(\d+)", name)
    return int(found.group(1)) if found else None
