"""The modes of `sync` on two hosts with two ranks each, whose cables are fast or slow.

Four replicas train the GPT recipe in one mode after the other. The table has a row for each: seconds of a step, bytes that come
over the cable of the first host, the share of a step in which no processor works for a rank, the optimizer states of the ranks,
and the losses after as many steps and after as many seconds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["main"]

ROOT = Path(__file__).parents[3]
CABLES = {"fast": "2gbit", "slow": "100mbit"}
MODES: dict[str, Any] = {
    "mean": "mean",
    "mean bf16": {"mode": "mean", "compress": "bf16"},
    "mean, inside 2": {"mode": "mean", "inside": 2},
    "sharded": "sharded",
    "fsdp": "fsdp",
    "master": "master",
    "local": {"mode": "local", "every": 8},
    "diloco": {"mode": "local", "every": 8, "outer": "nesterov"},
    "mean inside, local between": {"inside": "mean", "size": 2, "between": "local", "every": 8},
    "ring": "ring",
}
STEPS = 32
WARM = 4
"""The first steps of a mode, which are not measured."""
SECONDS = 10.0
"""After so many seconds of a mode its loss is noted, too."""


def _received() -> int:
    """Return the bytes that have come to this host over its cable."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("net0:"))
    return int(line.partition(":")[2].split()[0])


def rank_main(steps: int) -> None:
    """Train in each mode on this rank; rank 0 prints its results as JSON."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    from pipepart import Pipeline
    from recipes.gpt import GPT

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "net0"  # a host knows its own name as an address of loopback
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(64)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    # Text that can be learned: each token follows from the one before, with some noise.
    generator = torch.Generator().manual_seed(rank)
    follows = torch.randperm(64, generator=torch.Generator().manual_seed(99))

    def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [torch.randint(0, 64, (size,), generator=generator)]
        for _ in range(64):
            noise = torch.rand(size, generator=generator) < 0.1
            other = torch.randint(0, 64, (size,), generator=generator)
            rows.append(torch.where(noise, other, follows[rows[-1]]))
        text = torch.stack(rows, 1)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    for name, sync in MODES.items():
        torch.manual_seed(0)
        generator.manual_seed(rank)
        pipe = Pipeline(Trained(), batch(), stages=1, microbatches=1, sync=sync)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        seconds, computing, losses, at_time = [], [], [], None
        dist.barrier()
        received, begun = 0, time.perf_counter()
        for step in range(steps):
            if step == WARM:
                received = _received()
            started, used = time.perf_counter(), time.process_time()
            losses.append(float(pipe.step(*batch())))
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
            computing.append(time.process_time() - used)
            if at_time is None and time.perf_counter() - begun > SECONDS:
                at_time = sum(losses[-4:]) / len(losses[-4:])
        dist.barrier()
        cable = (_received() - received) / (steps - WARM)
        pipe.average_replicas()
        own = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        mine = torch.tensor(
            [
                sum(seconds[WARM:]) / len(seconds[WARM:]),
                1 - median(computing[WARM:]) / median(seconds[WARM:]),
                own / sum(p.numel() for p in pipe.parameters()),
                sum(losses[-4:]) / 4,
                -1.0 if at_time is None else at_time,
            ],
            dtype=torch.float64,
        )
        all_of = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of, mine)
        found.append((name, cable, [one.tolist() for one in all_of]))
        del pipe, optimizer
    if rank == 0:
        print("RESULTS " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def main(words: list[str]) -> int:
    """Run on hosts with fast and slow cables, and print a table for each; `words` name cables, or a number of steps."""
    steps = next((int(word) for word in words if word.isdigit()), STEPS)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "hosts")]
    hosts_of: Any = import_module("support.hosts")
    jobs: Any = import_module("host_jobs")
    if why := hosts_of.why_no_hosts():
        print(f"this bench makes hosts: {why}")
        return 2
    for cable in [word for word in words if word in CABLES] or list(CABLES):
        with tempfile.TemporaryDirectory() as folder, hosts_of.made_hosts(2, rate=CABLES[cable]) as hosts:
            programs = jobs.torchrun(hosts, 2, [str(Path(__file__).resolve()), str(steps)], Path(folder))
            said = _said(programs)
        line = next((line for text in said for line in text.splitlines() if "RESULTS " in line), None)
        if line is None:
            print("\n".join(said))
            return 1
        print(
            f"{cable} cables ({CABLES[cable]})\n" + _table(json.loads(line.split("RESULTS ", 1)[1]), steps), flush=True
        )
    return 0


def _said(programs: list[Any]) -> list[str]:
    """Return what the programs of both hosts have printed, after both have ended or one has failed."""
    while any(program.poll() is None for program in programs) and not any(program.poll() for program in programs):
        time.sleep(0.5)
    return [
        program.stdout.read()
        for program in sorted(programs, key=lambda one: one.poll() is None)
        if program.poll() is not None
    ]


def _table(found: list[Any], steps: int) -> str:
    head = (
        "sync",
        "ms/step",
        "of mean",
        "MB/step on a cable",
        "waits",
        "states",
        f"loss, {steps} steps",
        f"loss, {SECONDS:.0f} s",
    )
    rows: list[tuple[str, ...]] = [head]
    base = max(one[0] for one in found[0][2])
    for name, cable, ranks in found:
        seconds = max(one[0] for one in ranks)
        at_time = [one[4] for one in ranks]
        rows.append(
            (
                name,
                f"{seconds * 1e3:.1f}",
                f"{seconds / base:.2f}",
                f"{cable / 1e6:.2f}",
                f"{sum(one[1] for one in ranks) / len(ranks):.0%}",
                " ".join(f"{one[2]:.0%}" for one in ranks),
                f"{sum(one[3] for one in ranks) / len(ranks):.3f}",
                "-" if min(at_time) < 0 else f"{sum(at_time) / len(at_time):.3f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    rank_main(int(sys.argv[1])) if "RANK" in os.environ else sys.exit(main(sys.argv[1:]))
