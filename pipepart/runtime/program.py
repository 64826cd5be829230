"""One recorded step, cut into chunks and ready to run on batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipepart.capture import Chunk, Recording
from pipepart.errors import PipelineError
from pipepart.planning import Plan
from pipepart.runtime.batch_norm import BatchStatistics
from pipepart.runtime.executor import Executor, StepInput
from pipepart.runtime.header import share
from pipepart.runtime.mesh import Groups
from pipepart.runtime.messages import Routes
from pipepart.runtime.microbatch import (
    MicrobatchSizes,
    batch_size_of,
    fitting_sizes,
    merge_outputs,
    microbatch_sizes,
    slice_leaves,
)
from pipepart.runtime.replicas import ReplicaMean
from pipepart.runtime.tracing import Trace
from pipepart.runtime.transport import Transport
from pipepart.schedule import Schedule

__all__ = ["Program", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """Merged outputs of a step."""

    outputs: list[Any]
    """Flat outputs in the order of the recording. Scalars are on every stage; other tensors on the last stage, and
    None elsewhere unless they were asked for everywhere."""
    sizes: MicrobatchSizes


class Program:
    """The chunks of one recording on this stage."""

    def __init__(
        self,
        recording: Recording,
        chunks: Sequence[Chunk],
        plan: Plan,
        groups: Groups | None,
        transport: Transport | None,
        device: torch.device,
        batch_norm: str = "microbatch",
    ) -> None:
        self.recording, self.chunks, self._plan, self._groups, self._device = recording, chunks, plan, groups, device
        self._stage = groups.stage if groups is not None else 0
        self._first, self._last = plan.placement[0], plan.placement[-1]
        self._transport = transport
        routes = Routes.of(chunks, plan.placement)
        again = [index for index, on in enumerate(plan.recompute) if on]
        splits = plan.make_schedule().splits_backward
        self.executor = Executor(chunks, routes, self._stage, transport, device, recording.loss_index, splits, again)
        own = [chunk for chunk in chunks if plan.placement[chunk.index] == self._stage]
        self._statistics = BatchStatistics(own) if batch_norm == "batch" else None
        self._forms: dict[Any, int] = {}
        self._schedules: dict[tuple[int, bool], Schedule] = {}

    def run(
        self,
        leaves: Sequence[Any] | None,
        *,
        train: bool,
        loss_scale: float = 1.0,
        outputs_everywhere: bool = False,
        separate: Collection[int] = (),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        mean: ReplicaMean | None = None,
        trace: Trace | None = None,
    ) -> StepResult:
        """Run all micro-batches. `leaves` are needed on the first stage only; what others pass is not looked at.

        The outputs `separate` are not merged: the last stage gets the list over the micro-batches, the others None.
        """
        if train and self.recording.loss_index is None:
            raise PipelineError(
                "there is no loss to train on: expected the step to return a scalar tensor that requires grad, a dict with "
                "'loss', or a tuple that starts with it. Use evaluate() for a forward without loss."
            )
        step, sizes = self._prepare(leaves)
        schedule = self.schedule(len(sizes), forward=not train)
        with self._statistics.one_update() if train and self._statistics is not None else nullcontext():
            outputs = self.executor.run(schedule, step, loss_scale, context, mean, trace)
        merged = None
        if outputs is not None:
            kept = [tuple(None if i in separate else value for i, value in enumerate(part)) for part in outputs]
            merged = merge_outputs(kept, sizes)
            for index in separate:
                merged[index] = _Separate(part[index] for part in outputs)
        return StepResult(self._spread(merged, outputs_everywhere), sizes)

    def schedule(self, microbatches: int, forward: bool) -> Schedule:
        key = (microbatches, forward)
        if key not in self._schedules:
            self._schedules[key] = self._plan.make_schedule(microbatches, forward)
        return self._schedules[key]

    def _prepare(self, leaves: Sequence[Any] | None) -> tuple[StepInput, MicrobatchSizes]:
        """Cut the batch on the first stage and tell the others its form."""
        header: Any = None
        microbatches = None
        if self._stage == self._first:
            assert leaves is not None
            by_name = dict(zip((item.name for item in self.recording.inputs), leaves))
            kinds = {item.name: item.kind for item in self.recording.inputs}
            tensors = {name: leaf for name, leaf in by_name.items() if kinds[name] == "tensor"}
            numbers = {name: leaf for name, leaf in by_name.items() if kinds[name] == "number"}
            total = batch_size_of(list(tensors.values()))
            # A last batch that is smaller than the number of micro-batches runs with fewer of them.
            sizes = microbatch_sizes(total, min(total, self._plan.microbatches))
            if set(sizes.sizes) != {self._plan.microbatch_size}:  # not what the plan was made for
                sizes = fitting_sizes(self.recording, leaves, self._plan.microbatches) or sizes
            parts = slice_leaves(list(tensors.values()), sizes)
            microbatches = [{**by_name, **dict(zip(tensors, part))} for part in parts]
            forms = [tuple((tuple(t.shape), str(t.dtype)) for t in part) for part in parts]
            header = (sizes.sizes, tuple(self._forms.setdefault(form, len(self._forms)) for form in forms), numbers)
        if self._groups is not None and self._transport is not None:
            header = share(header, self._groups, self._transport, self._first, self._device)
        counts, forms, numbers = header
        sizes = MicrobatchSizes(counts)
        return StepInput(forms, sizes.weights, numbers, microbatches), sizes

    def _spread(self, merged: list[Any] | None, everywhere: bool) -> list[Any]:
        """Give the outputs of the last stage to all stages."""
        if self._groups is None or self._transport is None:
            assert merged is not None
            return merged
        described = [_describe(value) for value in merged] if merged is not None else None
        described = share(described, self._groups, self._transport, self._last, self._device)
        if merged is not None and not everywhere:
            return merged
        outputs: list[Any] = []
        for index, (kind, *content) in enumerate(described):
            own = merged[index] if merged is not None else None
            if kind == "here":
                outputs.append(own)
            elif kind == "plain":
                outputs.append(content[0])
            elif kind == "scalar":  # its value came with the description
                outputs.append(torch.tensor(content[0], dtype=content[1], device=self._device))
            elif everywhere:
                buffer = (
                    torch.empty(content[0], dtype=content[1], device=self._device) if own is None else own.contiguous()
                )
                dist.broadcast(buffer, self._groups.rank_of_stage(self._last), group=self._groups.pipeline)
                outputs.append(buffer)
            else:
                outputs.append(None)
        return outputs


class _Separate(list):
    """The values of one output for each micro-batch; they stay on the last stage."""


def _describe(value: Any) -> tuple[Any, ...]:
    """What other stages must know of an output: its value if it is small, its form if it is a tensor."""
    if isinstance(value, _Separate):
        return ("here",)
    if not isinstance(value, torch.Tensor):
        return ("plain", value)
    return ("scalar", value.item(), value.dtype) if value.dim() == 0 else ("tensor", tuple(value.shape), value.dtype)
