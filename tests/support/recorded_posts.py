"""The posts and waits of the real executor on all stages, as programs for `channel_rules`.

The stages run in threads of one process, and their transfers are matched in memory, so a recording never hangs. A recording
has the set-up of the communicators and two steps: one with forms that no receiver knows, and one with known forms.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from pipepart.recording import Chunk, Recording, op_of, record, split
from pipepart.runtime.executor import Executor, PreparedBatch, StageChunks, StepWork
from pipepart.runtime.mailbox import Routes
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.schedule import Schedule, make_schedule, messages_of
from pipepart.schedule.channel_programs import set_up_posts
from pipepart.schedule.channel_rules import Compute, Entry, Sync
from support.logged_transport import HostLog, Lines, LoggedTransport

__all__ = ["Case", "Recorded", "grid", "record_posts", "with_host_waits"]


@dataclass(frozen=True)
class Case:
    """A schedule, and the steps that are recorded with it."""

    schedule: str
    stages: int
    microbatches: int
    skips: bool = False
    uneven: bool = False
    training: bool = True
    options: tuple[tuple[str, int], ...] = ()
    """Further arguments of `make_schedule`: chunks, slack."""

    def __str__(self) -> str:
        words = [self.schedule, *(f"{name}={value}" for name, value in self.options), f"{self.stages} stages"]
        marks = {"skips": self.skips, "uneven": self.uneven, "evaluation": not self.training}
        return ", ".join([*words, f"{self.microbatches} micro-batches", *(name for name, on in marks.items() if on)])

    def make_schedule(self) -> Schedule:
        """Return the schedule of training, or that of evaluation over the same chunks."""
        sizes: dict[str, Any] = {"stages": self.stages, "microbatches": self.microbatches}
        found = make_schedule(self.schedule, **sizes, **dict(self.options))
        return found if self.training else make_schedule("forward", **sizes, placement=found.placement)


def grid(stages: Sequence[int] = (2, 3, 4, 8)) -> Iterator[Case]:
    """Every schedule at these numbers of stages, with and without skips, uneven micro-batches and backward."""
    for count in stages:
        kinds: list[tuple[str, dict[str, int]]] = [(name, {}) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v")]
        kinds += [("gpipe", {"chunks": 2}), ("interleaved", {"chunks": 2}), ("interleaved", {"chunks": 3})]
        kinds += [("1f1b", {"slack": count - 1}), ("1f1b", {"slack": 2 * count})]
        kinds += [(name, {}) for name in ("v_half", "v_min", "dualpipe_v", "zb_1p", "zb_2p")]
        for name, options in kinds:
            for number in range(8):
                skips, uneven, evaluation = bool(number & 1), bool(number & 2), bool(number & 4)
                microbatches = count + 2 if not options.get("slack") else 3 * count
                yield Case(name, count, microbatches, skips, uneven, not evaluation, tuple(options.items()))


@dataclass(frozen=True)
class Recorded:
    """The programs of all hosts in one case."""

    case: Case
    schedule: Schedule
    routes: Routes
    programs: tuple[tuple[Entry, ...], ...]


def with_host_waits(programs: Sequence[Sequence[Entry]]) -> list[list[Entry]]:
    """Return the programs of a model with an op in every forward for which the host waits (``.item()``)."""
    return [
        [
            part
            for entry in program
            for part in ((entry, Sync()) if isinstance(entry, Compute) and entry.action.kind == "F" else (entry,))
        ]
        for program in programs
    ]


def record_posts(case: Case, posting: int | str) -> Recorded:
    """Run two steps of a case and return what the hosts did.

    `posting`: the number of receives that are posted ahead, or ``planned`` (see `pipepart.schedule.channel_programs`).
    """
    schedule = case.make_schedule()
    recording, chunks = _chunks(schedule.chunks, case.skips)
    routes = Routes.of(chunks, schedule.placement)
    messages = messages_of(schedule, routes.forward, () if schedule.forward_only else routes.backward_pairs)
    lines = Lines()
    logs = [HostLog(stage, set_up_posts(stage, messages.channels)) for stage in range(schedule.stages)]
    failures: list[BaseException] = []

    def run(log: HostLog) -> None:
        try:
            _run_stage(
                case, schedule, routes, recording, chunks, log, lines, None if posting == "planned" else int(posting)
            )
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return Recorded(case, schedule, routes, tuple(log.program() for log in logs))


def _run_stage(
    case: Case,
    schedule: Schedule,
    routes: Routes,
    recording: Recording,
    chunks: Sequence[Chunk],
    log: HostLog,
    lines: Lines,
    ahead: int | None,
) -> None:
    own = {chunk.index: chunk for chunk in chunks if schedule.placement[chunk.index] == log.stage}
    assert recording.loss_index is not None
    device, control = (LoggedTransport(log, lines, kind, ahead) for kind in ("device", "control"))
    roots, recompute, cpu = {"loss": recording.loss_index}, frozenset[int](), torch.device("cpu")
    last_chunk = len(chunks) - 1
    runner = Executor(StageChunks(log.stage, own, last_chunk, routes, roots, recompute, device, control, cpu))
    first, last, count = schedule.placement[0], schedule.placement[-1], schedule.microbatches
    sizes = [2 + (case.uneven and k < count // 2) for k in range(count)]
    leaves = [dict(zip((i.name for i in recording.inputs), _batch(size))) for size in sizes]
    batch = PreparedBatch(
        MicrobatchSizes(tuple(sizes)), tuple(size - 2 for size in sizes), {}, sum(sizes), None, None,
        leaves if log.stage == first else None,
    )  # fmt: skip
    for _ in range(2):
        _share(log, first, schedule.stages)  # the header of the step
        runner.run(schedule, StepWork(batch, (1.0 / count,) * count, trace=log))  # type: ignore[arg-type]
        if log.stage == last:
            log.add_entry(Sync())  # the loss is read
        _share(log, last, schedule.stages)


def _share(log: HostLog, source: int, stages: int) -> None:
    """Log the message in host memory by which all stages learn a value of one."""
    for other in range(stages):
        if other != source and source == log.stage:
            log.add_control("send", other)
        elif other == log.stage != source:
            log.add_control("recv", source)


# ---- the model


class _Net(nn.Module):
    """A linear layer for each chunk.

    With skips, a layer uses two results before it, every second layer sends two tensors to the next, and the loss uses an
    early result.
    """

    def __init__(self, layers: int, skips: bool) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers)), skips
        self.gates = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers - 1 if skips else 0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        gate: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            seen.append(x)
            x = x + seen[index - 1] if self.skips and index > 1 else x
            x = x if gate is None else x + gate
            gate = self.gates[index](x) if self.skips and index % 2 == 0 and index < len(self.gates) else None
            x = layer(x)
        x = x + seen[1] if self.skips else x
        return (x - y).pow(2).mean()


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(size, 2), torch.zeros(size, 2)


@cache
def _chunks(count: int, skips: bool) -> tuple[Recording, tuple[Chunk, ...]]:
    """Return a recorded model and its chunks, one for each layer. Sums belong to the layer after them."""
    recording = record(_Net(count, skips), _batch(2))
    chunk_of, later = [], count - 1
    for node in reversed(recording.ops):
        name, _, number = op_of(node).module.partition(".")
        later = int(number) if name in ("layers", "gates") else later
        chunk_of.append(later)
    return recording, split(recording, chunk_of[::-1], count)
