"""The modes in which replicas are kept in step.

`python -m tools.bench.sync` trains the GPT recipe on two replicas of two stages in each mode; the modes take turns in the
same processes. The table has the seconds of a step, the bytes of the vectors that a rank exchanges with other replicas in a
step, the optimizer states of the ranks as a share of those of their stage, and the loss after the same number of steps.

`python -m tools.bench.sync hosts [fast | slow] [STEPS]` trains four replicas on two hosts in each mode, with fast and with slow
cables (network namespaces; needs root).

`python -m tools.bench.sync equal` trains ten steps with every mode and optimizer of `tests/runtime/test_sync_modes.py` at
{1, 2} stages x {2, 4} replicas, and compares with one process on all batches.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench.sync.on_hosts import main as on_hosts

TESTS = Path(__file__).parents[3] / "tests"
MODES: dict[str, Any] = {
    "mean": "mean",
    "mean bf16": {"mode": "mean", "compress": "bf16"},
    "nested": {"mode": "mean", "inside": 2},
    "sharded": "sharded",
    "fsdp": "fsdp",
    "master": "master",
    "local": {"mode": "local", "every": 8},
    "diloco": {"mode": "local", "every": 8, "outer": "nesterov"},
    "ring": "ring",
}
APART = ("local", "diloco", "ring")
"""Modes of replicas that make updates of their own."""
ROUNDS, STEPS = 12, 4
LIMIT = 1800.0


# ---- speed: on a rank


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the bytes of vectors that this rank exchanges asynchronously, as modes do."""
    import torch.distributed as dist

    sizes: list[int] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "reduce", "broadcast")}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **given: Any) -> Any:
            if given.get("async_op"):
                sizes.append(tensor.numel() * tensor.element_size())
            return original(tensor, *args, **given)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(original))
    try:
        yield sizes
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _measure() -> dict[str, dict[str, Any]]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    from pipepart import Pipeline
    from recipes.gpt import GPT

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(256)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    replica = dist.get_rank() // 2
    generator = torch.Generator().manual_seed(replica)
    text = [torch.randint(0, 64, (16, 65), generator=generator) for _ in range(8)]
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in text]
    runs: dict[str, Any] = {}
    for name, sync in MODES.items():
        torch.manual_seed(0)
        pipe = Pipeline(Trained(), batches[0], stages=2, microbatches=4, sync=sync)
        runs[name] = pipe, torch.optim.AdamW(pipe.parameters(), lr=3e-4)
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "bytes": [], "loss": 0.0} for name in MODES}
    for number in range(ROUNDS):
        for name, (pipe, optimizer) in runs.items():
            dist.barrier()
            started = time.perf_counter()
            with _counted() as sizes:
                for step in range(STEPS):
                    loss = pipe.step(*batches[(number * STEPS + step) % len(batches)])
                    optimizer.step()
                    optimizer.zero_grad()
            dist.barrier()
            if number:  # the first round warms up
                found[name]["seconds"].append((time.perf_counter() - started) / STEPS)
                found[name]["bytes"].append(sum(sizes) / STEPS)
            found[name]["loss"] = float(loss)
    for name, (pipe, optimizer) in runs.items():
        own = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        found[name]["share"] = own / sum(p.numel() for p in pipe.parameters())
    return found


# ---- tables


def speed() -> int:
    ranks: Any = import_module("support.ranks")
    found = ranks.run_ranks(4, _measure, timeout=LIMIT)
    base = [median(result["mean"]["seconds"]) for result in found]
    print(f"{'sync':10} {'ms/step':>8} {'of mean':>8} {'MB/step':>8}  {'states of the ranks':28} {'loss':>7}")
    for name in MODES:
        results = [result[name] for result in found]
        seconds = max(median(result["seconds"]) for result in results)
        shares = " ".join(f"{result['share']:.1%}" for result in results)
        most = max(median(result["bytes"]) for result in results) / 1e6
        losses = sum(result["loss"] for result in results[::2]) / 2
        print(f"{name:10} {seconds * 1e3:8.1f} {seconds / max(base):8.2f} {most:8.2f}  {shares:28} {losses:7.4f}")
    return 0


def equal() -> int:
    cases: Any = import_module("test_sync_modes")
    ranks: Any = import_module("support.ranks")
    wrong = 0
    modes = [sync for name, sync in MODES.items() if "bf16" not in name and name not in APART]
    for replicas, stages, sync, optimizer in itertools.product((2, 4), (1, 2), modes, cases.OPTIMIZERS):
        what = f"{sync!s:8} {optimizer:8} {stages} stage(s) x {replicas} replicas"
        try:
            cases.check(
                ranks.run_ranks(stages * replicas, cases.train, sync, stages, optimizer, timeout=LIMIT),
                stages,
                optimizer,
            )
            print(f"{what}: equal", flush=True)
        except AssertionError as error:
            wrong += 1
            print(f"{what}: {error}", flush=True)
    print(f"{wrong} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "runtime")]
    if sys.argv[1:2] == ["hosts"]:
        sys.exit(on_hosts(sys.argv[2:]))
    sys.exit(equal() if sys.argv[1:] == ["equal"] else speed())
