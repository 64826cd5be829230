"""The inputs of a stage, and recorded steps divided into the chunks of a plan.

A step that combines samples has a tail, which runs once per batch after the last chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.cost import OpCosts
from pipepart.errors import PlanError
from pipepart.graph import OpGraph
from pipepart.options import Options
from pipepart.planning import Plan
from pipepart.recording import Chunk, Recording, split
from pipepart.runtime.compiled.trial import Trial
from pipepart.runtime.head_slices import with_sliced_heads
from pipepart.runtime.mesh import Groups
from pipepart.samples import Weighed, unweighed, weigh
from pipepart.samples.laws import merged
from pipepart.samples.tail import Tail, TailCut

__all__ = ["ChunkedStep", "RecordedStep", "StageInputs", "TailRun", "chunk_step"]


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step and its treatment of samples, as `build` hands it to the runtime."""

    name: str
    recording: Recording
    cut: TailCut | None = None
    """The beginning of the tail of the step; None without a tail."""
    averaged: Collection[int] = ()
    """Outputs whose values are averaged over replicas after the step."""
    counts: bool = False
    """Whether Python numbers of the result become those of the whole batch."""


@dataclass(frozen=True)
class StageInputs:
    """The result of set-up, from which `build` makes a `StageRuntime`."""

    root: nn.Module
    """The whole model."""
    plan: Plan
    graph: OpGraph
    """The ops that the plan was made for."""
    step: RecordedStep
    """The step that the plan was made for."""
    groups: Groups | None
    """The process groups; None in a job of one process."""
    device: torch.device
    options: Options
    costs: OpCosts | None = None
    """The costs that the plan was made with; None if the plan was given, and on ranks that did not measure."""
    numbers: dist.ProcessGroup | None = None
    """This stage in the replicas whose gradients are combined, for plain numbers in host memory; None: there are no others."""
    trial: Trial = field(default_factory=Trial)
    """The trial of ``compile="auto"``."""

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.groups.stage if self.groups is not None else 0

    @property
    def is_first(self) -> bool:
        """Whether this stage reads the batch."""
        return self.stage == self.plan.placement[0]


@dataclass(frozen=True, eq=False)
class ChunkedStep:
    """The chunks of one recording, and the way their outputs make up those of the whole batch."""

    recording: Recording
    chunks: tuple[Chunk, ...]
    weighed: Weighed
    """The recording without its tail, with the weights of the whole batch."""
    tail: Tail | None = None

    @property
    def laws(self) -> tuple[str, ...]:
        """For each output of the recording the law by which values of micro-batches make up that of the batch."""
        if self.tail is None:
            root = self.weighed.recording.loss_index
            added = root is not None and root != self.recording.loss_index
            return self.weighed.laws[: len(self.weighed.laws) - added]
        known = dict(zip(self.tail.kept, self.weighed.laws))
        return tuple(known.get(i, "unknown") for i in range(len(self.tail.kept) + len(self.tail.cut.outputs)))


def chunk_step(step: RecordedStep, chunk_of: Mapping[str, int], inputs: StageInputs) -> ChunkedStep:
    """Divide a recorded step into chunks. The parameters of its tail belong to the last chunk."""
    recording, cut, plan = step.recording, step.cut, inputs.plan
    count = len(plan.placement)
    devices = [inputs.device] * count  # a rank runs its own chunks only

    def weighed_of(body: Recording, averaged: Collection[int], untouched: Collection[int] = ()) -> Weighed:
        if inputs.options.loss == "microbatch":
            return unweighed(body, step.counts)
        alone = (
            inputs.options.sync_mode.apart and body.training
        )  # divides the loss by numbers of the replicas in step with it
        replicas = inputs.options.sync_mode.together(plan.replicas) if alone else plan.replicas
        return weigh(body, replicas, averaged, inputs.device, untouched, accumulates=True, counts=step.counts)

    def divided(weighed: Weighed) -> tuple[Chunk, ...]:
        owner = weighed.chunk_of(chunk_of)
        return split(with_sliced_heads(weighed.recording, owner, plan.head), owner, count, devices=devices)

    if cut is None:
        weighed = weighed_of(recording, step.averaged)
        chunks = divided(weighed)
        return ChunkedStep(recording, chunks, weighed)
    if cut.loss and recording.training:
        _check_schedule(plan)
    tail = Tail(recording, cut, inputs.device)
    kept = len(tail.kept)
    averaged = [tail.kept.index(index) for index in step.averaged if index in tail.kept]
    weighed = weighed_of(tail.body, averaged, range(kept, kept + len(cut.inputs)))
    *others, last = divided(weighed)
    parameters = tuple(dict.fromkeys((*last.parameters, *tail.parameters)))
    buffers = tuple(dict.fromkeys((*last.buffers, *tail.buffers)))
    last = replace(last, parameters=parameters, buffers=buffers)
    return ChunkedStep(recording, (*others, last), weighed, tail)


def _check_schedule(plan: Plan) -> None:
    """Refuse a schedule with a backward of the last chunk before all its forwards, for a loss that a tail computes."""
    last = len(plan.placement) - 1
    kinds = [action.kind for action in plan.make_schedule().actions[plan.placement[-1]] if action.chunk == last]
    first = next((index for index, kind in enumerate(kinds) if kind in "BIW"), len(kinds))
    if "F" in kinds[first:]:
        raise PlanError(
            "ops at the end of the step run once per batch, so the loss is known after all forwards, but the schedule "
            f"{plan.schedule!r} starts backwards before that. Use schedule='gpipe' (the choice of 'auto' here), or "
            "microbatches=1."
        )


class TailRun:
    """The tail in one step. The executor gives it the outputs of the last chunk for all micro-batches."""

    def __init__(self, tail: Tail, sizes: Sequence[int], loss_scale: float, context: Any, train: bool) -> None:
        self._tail, self._sizes, self._scale, self._context = tail, sizes, loss_scale, context
        self._train = train and tail.loss is not None
        self.outputs: list[Any] = []
        """The outputs of the tail, in the order of its cut."""
        self.gradients: list[dict[int, torch.Tensor]] = []
        """For each micro-batch the gradients of outputs of the last chunk, by their index."""

    def run(self, bodies: Sequence[tuple[Any, ...]]) -> None:
        """Merge the micro-batches and run the forward and, if the loss is computed here, the backward."""
        first = len(self._tail.kept)
        roots = self._tail.roots if self._train else ()
        leaves = [{index: body[index].detach().requires_grad_() for index in roots} for body in bodies]
        with torch.set_grad_enabled(self._train), self._context():
            arguments = []
            for index, law in enumerate(self._tail.cut.inputs.values(), first):
                parts = [own.get(index, body[index]) for own, body in zip(leaves, bodies)]
                value = merged(law, parts, self._sizes)
                copied = self._tail.inplace and isinstance(value, torch.Tensor)
                arguments.append(value.clone() if copied else value)
            results = self._tail.module(*arguments)
        if self._train:
            loss = results[self._tail.loss]
            torch.autograd.backward(loss, torch.full_like(loss, self._scale))
        self.outputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in results]
        self.gradients = [{index: leaf.grad for index, leaf in own.items() if leaf.grad is not None} for own in leaves]
