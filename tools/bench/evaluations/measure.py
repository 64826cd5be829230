"""Batches of an evaluation on stages that sleep: in a series, and one by one.

The share is that of what the slowest stage allows: its forwards of all micro-batches, one after the other, and nothing else.
On a busy machine every wake-up is late, and so are naps. So the bench also says for which share of the time the busiest stage
was in its forwards, and how long the machine takes to wake a process that waits for a message.
"""

from __future__ import annotations

import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from tools.bench.runtime.models import SleepLayer, slept
from tools.bench.runtime.processes import on_ranks

__all__ = ["evaluations"]

STAGES, MICROBATCHES, BATCHES, NAP = 4, 8, 50, 0.010


class Scorer(nn.Module):
    """Sleeping layers that return what they have computed for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(SleepLayer(NAP) for _ in range(STAGES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _batches() -> list[torch.Tensor]:
    """The last one is smaller."""
    torch.manual_seed(1)
    return [torch.randn(2 * MICROBATCHES if index < BATCHES - 1 else 6, 256) for index in range(BATCHES)]


def _alone(rank: int, size: int) -> float:
    """Median seconds of one nap in a process that does nothing else."""
    layer, x, times = SleepLayer(NAP), torch.randn(2, 256), []
    with torch.no_grad():
        for _ in range(50):
            time.sleep(0.002)
            began = time.perf_counter()
            layer(x)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


_WAITS = """
import struct, sys, time
while data := sys.stdin.buffer.read(8):
    sys.stdout.buffer.write(struct.pack("d", time.monotonic() - struct.unpack("d", data)[0]))
    sys.stdout.buffer.flush()
"""


def _wake_up() -> float:
    """Median seconds until a process that waits for a message runs."""
    process = subprocess.Popen([sys.executable, "-c", _WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    times = []
    for _ in range(100):
        time.sleep(0.01)
        process.stdin.write(struct.pack("d", time.monotonic()))
        process.stdin.flush()
        times.append(struct.unpack("d", process.stdout.read(8))[0])
    process.stdin.close()
    process.wait()
    return statistics.median(times)


def _one_by_one() -> None:
    """Let every batch run alone in this process."""
    from pipepart.runtime import program
    from pipepart.runtime.pace import Pace

    program.pace_of = lambda *_: Pace()  # type: ignore[assignment]


def by_pipeline(rank: int, size: int, together: bool) -> tuple[float, float, list[Any]]:
    import torch.distributed as dist

    from pipepart import Pipeline

    if not together:
        _one_by_one()
    batches = _batches()
    cuts = [f"layers.{i}" for i in range(1, STAGES)]
    pipe = Pipeline(Scorer(), (batches[0],), stages=size, microbatches=MICROBATCHES, split_at=cuts, schedule="gpipe")
    pipe.evaluate(batches[0])
    dist.barrier()
    started, before = time.perf_counter(), slept()
    outputs = list(pipe.evaluations((batch,) for batch in batches))
    dist.barrier()
    return time.perf_counter() - started, slept() - before, [output.numpy() for output in outputs]


def by_trainer(rank: int, size: int, together: bool) -> tuple[float, float, list[Any]]:
    import lightning as L

    from pipepart import PipelineStrategy

    if not together:
        _one_by_one()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Scorer()

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(batch)

        def on_predict_start(self) -> None:
            self.started, self.before = time.perf_counter(), slept()

        def on_predict_end(self) -> None:
            self.seconds, self.slept = time.perf_counter() - self.started, slept() - self.before

    class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(_batches())

    cuts = [f"model.layers.{i}" for i in range(1, STAGES)]
    strategy: Any = PipelineStrategy(stages=size, microbatches=MICROBATCHES, split_at=cuts, schedule="gpipe")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Module()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=size, enable_checkpointing=False, **quiet)
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None)
    outputs: Any = trainer.predict(module, loader)
    return module.seconds, module.slept, [output.numpy() for output in outputs]


def _equal(found: Iterable[Any], expected: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(torch.from_numpy(one), other) for one, other in zip(found, expected, strict=True))


def evaluations(rounds: int = 3) -> None:
    """Print the shares, and stop if an output differs from that of one process."""
    nap = statistics.median(on_ranks(1, _alone)[0] for _ in range(rounds))
    with torch.no_grad():
        expected = [Scorer()(batch) for batch in _batches()]
    limit = nap * ((BATCHES - 1) * MICROBATCHES + 6)
    print(f"{BATCHES} batches, the last one smaller; {STAGES} stages; the slowest stage allows {limit:.2f} s")
    print(f"a nap takes {1e3 * nap:.2f} ms, waking a process up {1e3 * _wake_up():.2f} ms")
    print(f"{'':<30} {'in a series':>24} {'one by one':>24}")
    print(f"{'':<30}" + 2 * f" {'of the limit':>15} {'busy':>8}")
    for name, runner in (("Pipeline.evaluations", by_pipeline), ("trainer.predict", by_trainer)):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        busy: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for together in (True, False):
                answers = on_ranks(STAGES, runner, together)
                seconds[together].append(max(taken for taken, _, _ in answers))
                busy[together].append(max(slept for _, slept, _ in answers) / seconds[together][-1])
                if not all(_equal(outputs, expected) for _, _, outputs in answers):
                    raise SystemExit(f"{name}: the outputs differ from those of one process")
        shares = [
            f"{limit / statistics.median(seconds[how]):>15.1%} {statistics.median(busy[how]):>8.1%}"
            for how in (True, False)
        ]
        print(f"{name:<30} {shares[0]} {shares[1]}", flush=True)
