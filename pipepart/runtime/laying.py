"""A recorded step laid over the chunks of a plan: its tail is cut off, its weights are written in, and it is split."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from pipepart.options import Options
from pipepart.planning import Plan
from pipepart.recording import Chunk, Recording, split
from pipepart.runtime.tail_run import check_schedule
from pipepart.samples import Weighed, unweighed, weigh
from pipepart.samples.tail import Tail, TailCut

__all__ = ["Laid", "lay_out"]


@dataclass(frozen=True, eq=False)
class Laid:
    """The chunks of one recording, and how their outputs make up those of the whole batch."""

    recording: Recording
    chunks: tuple[Chunk, ...]
    weighed: Weighed
    """The recording, or the body that is left of it without its tail, with the weights of the whole batch in it."""
    tail: Tail | None = None

    @property
    def laws(self) -> tuple[str, ...]:
        """For each output of the recording, how values of micro-batches make up that of the batch."""
        if self.tail is None:
            root = self.weighed.recording.loss_index
            added = root is not None and root != self.recording.loss_index
            return self.weighed.laws[: len(self.weighed.laws) - added]
        known = dict(zip(self.tail.kept, self.weighed.laws))
        return tuple(known.get(i, "unknown") for i in range(len(self.tail.kept) + len(self.tail.cut.outputs)))


def lay_out(
    recording: Recording,
    chunk_of: Mapping[str, int],
    cut: TailCut | None,
    averaged: Collection[int],
    plan: Plan,
    options: Options,
    device: torch.device,
) -> Laid:
    """The chunks of a recording, and its tail, whose parameters belong to the last of them.

    `averaged`: outputs whose values are averaged over replicas after the step.
    """
    count = len(plan.placement)
    if cut is None:
        weighed = _weigh(recording, averaged, (), plan, options, device)
        return Laid(recording, split(weighed.recording, weighed.chunk_of(chunk_of), count), weighed)
    if cut.loss and recording.training:
        check_schedule(plan, "ops at the end of the step run once per batch")
    tail = Tail(recording, cut)
    kept = len(tail.kept)
    inside = [tail.kept.index(index) for index in averaged if index in tail.kept]
    weighed = _weigh(tail.body, inside, range(kept, kept + len(cut.inputs)), plan, options, device)
    *chunks, last = split(weighed.recording, weighed.chunk_of(chunk_of), count)
    parameters = tuple(dict.fromkeys((*last.parameters, *tail.parameters)))
    buffers = tuple(dict.fromkeys((*last.buffers, *tail.buffers)))
    return Laid(recording, (*chunks, replace(last, parameters=parameters, buffers=buffers)), weighed, tail)


def _weigh(
    recording: Recording,
    averaged: Collection[int],
    untouched: Collection[int],
    plan: Plan,
    options: Options,
    device: torch.device,
) -> Weighed:
    if options.loss == "microbatch":
        return unweighed(recording)
    return weigh(recording, plan.replicas, averaged, device, untouched, accumulates=True)
