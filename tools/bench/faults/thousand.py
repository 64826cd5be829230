"""A thousand runs that are broken on purpose, each in its own way, and what is left of them.

Every kind (raise, kill, stop) x phase x mode (ranks, stages, transport, plain or sharded checkpoints), at ranks and steps that
the seed draws. The cases are in an order that the seed fixes, so that parts (`--part 3/10`) of several runs make up the whole.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.bench.faults.job import CAUSE
from tools.bench.faults.repeat import STOP_LIMIT, maker_of
from tools.bench.faults.trained_job import CHECKPOINTS, Trained, train_rank

__all__ = ["cases", "once", "thousand"]

KINDS = ("raise", "kill", "stop")
PHASES = ("set-up", "forward", "backward", "communication", "update", "save", "validation")
SHAPES = ((2, 2), (4, 2), (4, 4))
"""Ranks, stages."""
TRANSPORTS = ("shared_memory", "group")
_NOT_REACHED = "the fault was never reached"
_BUSY = 6
"""Factor of the time limit of a job in which a rank is stopped, if its ranks have not come to the fault in time."""
_HANG = 120.0
"""Seconds after which a rank that has not ended hangs. The machine may be busy with other programs."""


def cases(count: int = 1000, seed: int = 0) -> list[Trained]:
    """The faults in their order. Each combination comes equally often, up to one."""
    chance = random.Random(seed)
    every = [
        (kind, phase, ranks, stages, transport, sharded)
        for kind, phase, (ranks, stages), transport, sharded in itertools.product(
            KINDS, PHASES, SHAPES, TRANSPORTS, (False, True)
        )
        if (kind, phase) != ("stop", "save")  # ranks wait for hours for one that writes: a disk may be slow
    ]
    found: list[Trained] = []
    while len(found) < count:
        chance.shuffle(every)
        for kind, phase, ranks, stages, transport, sharded in every[: count - len(found)]:
            writers = stages if sharded else 1  # only these write
            rank = chance.randrange(writers if phase == "save" else ranks)
            limit = STOP_LIMIT if kind == "stop" else 60.0
            found.append(
                Trained(
                    phase,
                    kind,
                    rank,
                    ranks,
                    transport,
                    limit,
                    stages=stages,
                    sharded=sharded,
                    step=chance.randrange(1, 5),
                )
            )
    return found


def thousand(part: str = "1/1", seed: int = 0, count: int = 1000, limit: float | None = None) -> tuple[str, bool]:
    """Run one part of the cases, for at most `limit` seconds; returns the table, and whether there were no problems."""
    number, parts = (int(word) for word in part.split("/"))
    chosen = cases(count, seed)[number - 1 :: parts]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "lightning", "pipepart"])
    begun, slowest, ran, wrong = time.monotonic(), 0.0, Counter[tuple[str, str]](), []
    for index, fault in enumerate(chosen):
        if limit is not None and time.monotonic() - begun > limit:
            break
        took, problems = once(context, fault)
        if fault.how == "stop" and _NOT_REACHED in problems:  # the machine is busy: the limit was reached before
            took, problems = once(context, replace(fault, limit=_BUSY * fault.limit))
        slowest = max(slowest, took)
        ran[fault.how, fault.where] += 1
        wrong += [f"{index}: {fault}: {problem}" for problem in problems]
        kind = "sharded" if fault.sharded else "plain"
        place = f"rank {fault.rank} of {fault.ranks // fault.stages} x {fault.stages} {fault.transport:13} {kind:7}"
        print(
            f"{index + 1:4}/{len(chosen)} {fault.how:5} in {fault.where:13} {place} {took:5.1f} s {'; '.join(problems)}",
            flush=True,
        )
    lines = [f"{'phase':14} " + " ".join(f"{kind:>6}" for kind in KINDS)]
    lines += [f"{phase:14} " + " ".join(f"{ran[kind, phase]:6}" for kind in KINDS) for phase in PHASES]
    done = f"{sum(ran.values())} of {len(chosen)} jobs of part {part}, seed {seed}"
    lines.append(f"{done}: {len(wrong)} problems; slowest end {slowest:.1f} s")
    return "\n".join([*lines, *wrong]), not wrong


def once(context: Any, fault: Trained) -> tuple[float, list[str]]:
    """Seconds from the fault to the end of the last rank that can end, and all that was not as it should be."""
    with tempfile.TemporaryDirectory(prefix="pipepart-faults-") as folder:
        processes = [
            context.Process(target=train_rank, args=(rank, folder, fault), daemon=True) for rank in range(fault.ranks)
        ]
        for process in processes:
            process.start()
        expected = [p for rank, p in enumerate(processes) if fault.how != "stop" or rank != fault.rank]
        deadline = time.monotonic() + _HANG
        for process in expected:
            process.join(max(0.0, deadline - time.monotonic()))
        ended = time.time()
        problems = [f"rank {rank} hangs" for rank, p in enumerate(processes) if p in expected and p.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        struck = Path(folder, "struck")
        took = ended - float(struck.read_text()) if struck.exists() else 0.0
        if not struck.exists():
            problems.append(_NOT_REACHED)
        problems += _not_said(Path(folder), fault) + _checkpoint_faults(Path(folder))
        pids = {process.pid for process in processes}
    return took, problems + _left(pids)


def _not_said(folder: Path, fault: Trained) -> list[str]:
    """Every rank that lives must end with an error, and a cause that was raised must be named."""
    problems = []
    for rank in range(fault.ranks):
        if rank == fault.rank and fault.how != "raise":
            continue
        file = folder / f"said-{rank}"
        text = file.read_text() if file.exists() else ""
        last = text.strip().splitlines()[-1:] or [""]
        if not text or text == "finished":
            problems.append(f"rank {rank} said {text or 'nothing'}")
        elif fault.how == "raise" and CAUSE not in text:
            problems.append(f"rank {rank} does not name the cause: {last[0]}")
    return problems


def _checkpoint_faults(folder: Path) -> list[str]:
    """The newest checkpoint must be there and intact, at least as new as the last save that has ended."""
    from pipepart.errors import PipepartError
    from pipepart.lightning import sharded
    from pipepart.lightning.checkpoint_files import load_file, verify

    saved = folder / "saved"
    if not saved.exists():  # no save had ended before the fault
        return []
    least, path = int(saved.read_text() or 0), folder / CHECKPOINTS / "last.ckpt"
    try:
        sharded.bring_back(path)
        if sharded.is_sharded(path):
            sharded.verify_shards(path)
            found = sharded.load_rest(path, None)
        else:
            verify(path)
            found = load_file(path, None)
    except (PipepartError, OSError) as error:
        return [f"the newest checkpoint: {error}"]
    step = int(found["global_step"])
    return [] if step >= least - 1 else [f"the newest checkpoint is of step {step}, and that of step {least} was saved"]


def _left(pids: set[int | None]) -> list[str]:
    """Folders of these processes in shared memory, and processes that they have started."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    found = [f"left in shared memory: {name}" for name in names if (maker := maker_of(name)) and maker in pids]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) in pids and fields[0] != "Z":
            found.append(f"process {stat.parent.name} is left")
    return found
