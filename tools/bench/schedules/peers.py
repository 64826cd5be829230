"""The schedules that `torch.distributed.pipelining` generates, read as ours and put side by side with ours."""

from __future__ import annotations

import types
from collections.abc import Sequence

import torch.distributed.pipelining.schedules as torch_schedules

from pipepart.schedule import ChunkCosts, Schedule, from_csv, make_schedule, simulate

__all__ = ["TORCH_SCHEDULES", "peers", "torch_lists", "torch_schedule"]

TORCH_SCHEDULES = {
    "ScheduleGPipe": (1,),
    "Schedule1F1B": (1,),
    "ScheduleInterleaved1F1B": (1, 2, 3, 4),
    "ScheduleLoopedBFS": (1, 2, 3),
    "ScheduleInterleavedZeroBubble": (1, 2, 3, 4),
    "ScheduleZBVZeroBubble": (2,),
    "ScheduleDualPipeV": (2,),
}
"""Class name to the numbers of chunks per stage that are compared."""


def _stage(index: int, stages: int, ranks: int) -> types.SimpleNamespace:
    """As much of a pipeline stage as torch's generators look at; they only make lists, nothing runs."""
    return types.SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=ranks,
        group_rank=0,
        is_first=index == 0,
        is_last=index == stages - 1,
        has_backward=True,
        submod=None,
    )


def torch_lists(name: str, stages: int, microbatches: int, chunks: int, *, messages: bool = False) -> str:
    """The lists of a torch schedule as CSV text, with SEND and RECV if asked and if the class has them.

    Raises ValueError where torch refuses the numbers.
    """
    kind = getattr(torch_schedules, name)
    if issubclass(kind, torch_schedules.PipelineScheduleSingle):
        made = kind(_stage(0, stages, stages), microbatches)
    else:
        made = kind([_stage(stages * n, stages * chunks, stages) for n in range(chunks)], microbatches)
    rows = made.pipeline_order_with_comms if messages else made.pipeline_order
    return "".join(
        ",".join("" if action is None else str(action) for action in rows[rank]) + "\n" for rank in sorted(rows)
    )


def torch_schedule(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """A torch schedule as ours, proved."""
    return from_csv(torch_lists(name, stages, microbatches, chunks), name)


def peers(stages: Sequence[int], microbatches: Sequence[int]) -> str:
    """Step and peak of torch's lists and ours, F = I = W, equal stages, free links."""
    pairs = (
        ("ScheduleGPipe", "gpipe", 1),
        ("ScheduleInterleaved1F1B", "interleaved", 2),
        ("ScheduleInterleaved1F1B", "interleaved", 4),
        ("ScheduleInterleavedZeroBubble", "zb_v", 2),
        ("ScheduleZBVZeroBubble", "zb_v", 2),
        ("ScheduleDualPipeV", "zb_v", 2),
    )
    lines = [f"{'torch':31}{'ours':12}{'p':>3}{'m':>4}{'v':>3}{'step':>9}{'ours':>9}{'peak':>8}{'ours':>8}"]
    for p in stages:
        for m in microbatches:
            for theirs, ours, v in pairs:
                costs = ChunkCosts.even(p, v)
                try:
                    other = simulate(torch_schedule(theirs, p, m, v), costs)
                except ValueError as error:
                    lines.append(f"{theirs:31}{ours:12}{p:3}{m:4}{v:3}  refused by torch: {str(error).split('.')[0]}")
                    continue
                own = simulate(make_schedule(ours, stages=p, microbatches=m, chunks=v), costs)
                lines.append(
                    f"{theirs:31}{ours:12}{p:3}{m:4}{v:3}{other.step_time:9.2f}{own.step_time:9.2f}"
                    f"{max(other.peak_activations):8.2f}{max(own.peak_activations):8.2f}"
                )
    return "\n".join(lines)
