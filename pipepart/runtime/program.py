"""One recorded step, cut into chunks and ready to run on batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipepart.errors import PipelineError
from pipepart.options import Options
from pipepart.planning import Plan
from pipepart.recording.execution.ops_run import resolve
from pipepart.runtime.batch_norm import BatchStatistics
from pipepart.runtime.executor import Executor, StepInput
from pipepart.runtime.header import share
from pipepart.runtime.laying import Laid
from pipepart.runtime.mesh import Groups
from pipepart.runtime.messages import Routes
from pipepart.runtime.microbatch import (
    MicrobatchSizes,
    batch_size_of,
    batched_inputs,
    cut_batch,
    fitting_cut,
    merge_outputs,
)
from pipepart.runtime.randomness import seeded
from pipepart.runtime.replicas import ReplicaMean
from pipepart.runtime.tail_run import TailStep
from pipepart.runtime.tracing import Trace
from pipepart.runtime.transport import Transport
from pipepart.samples.numbers import Window, open_window
from pipepart.samples.tail import Tail
from pipepart.schedule import Schedule

__all__ = ["Program", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """Merged outputs of a step."""

    outputs: list[Any]
    """Flat outputs in the order of the recording. Scalars are on every stage; other tensors on the last stage, and
    None elsewhere unless they were asked for everywhere."""
    sizes: MicrobatchSizes
    laws: tuple[str, ...]
    """For each output, how values of micro-batches make up that of the batch (see `samples.weigh`)."""
    samples: int
    """Samples of the batch; of all replicas together if values of all of them were needed."""


class Program:
    """The chunks of one recording on this stage."""

    def __init__(
        self,
        laid: Laid,
        plan: Plan,
        groups: Groups | None,
        transport: Transport | None,
        device: torch.device,
        options: Options,
    ) -> None:
        self.recording, self._plan, self._groups, self._device = laid.recording, plan, groups, device
        self.chunks = chunks = laid.chunks
        self.weighed, self._tail, self._laws = laid.weighed, laid.tail, laid.laws
        self._draws = laid.recording.draws
        self._stage = groups.stage if groups is not None else 0
        self._first, self._last = plan.placement[0], plan.placement[-1]
        self._transport = transport
        routes = Routes.of(chunks, plan.placement)
        again = [index for index, on in enumerate(plan.recompute) if on]
        splits = plan.make_schedule().splits_backward
        body = self.weighed.recording
        self._in_graph = body.loss_index is not None and self.weighed.laws[body.loss_index] == "sum"
        self.executor = Executor(
            chunks, routes, self._stage, transport, device, body.loss_index, splits, again, body.roots
        )
        own = [chunk for chunk in chunks if plan.placement[chunk.index] == self._stage]
        self._statistics = BatchStatistics(own) if options.batch_norm == "batch" else None
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
        rescale: Callable[[float | None, int | None], float] = lambda denominator, batches: 1.0,
        draw_key: int | None = None,
        window: Window | None = None,
        position: int = 0,
    ) -> StepResult:
        """Run all micro-batches. `leaves` are needed on the first stage only; what others pass is not looked at.

        The outputs `separate` are not merged: the last stage gets the list over the micro-batches, the others None.
        `rescale` is told what the loss of the batch is divided by, and how many batches that is, before anything runs, and
        says what the batch counts. With a `draw_key`, ops that draw random numbers are seeded by it. `window`: the batches
        that are accumulated for one step of the optimizer; this one is at `position`. Only the first stage has it.
        """
        if train and self.recording.loss_index is None:
            raise PipelineError(
                "there is no loss to train on: expected the step to return a scalar tensor that requires grad, a dict with "
                "'loss', or a tuple that starts with it. Use evaluate() for a forward without loss."
            )
        step, sizes, samples, (denominator, batches) = self._prepare(leaves, train, window, position)
        loss_scale *= rescale(denominator, batches) if train else 1.0
        schedule = self.schedule(len(sizes), forward=not train)
        end = TailStep(self._tail, sizes.sizes, loss_scale, context, train) if self._tail is not None else None
        draws = seeded(draw_key, self._device) if draw_key is not None and self._draws else nullcontext()
        with self._statistics.one_update() if train and self._statistics is not None else nullcontext(), draws as begin:
            outputs = self.executor.run(schedule, step, loss_scale, context, mean, trace, end, begin)
        merged = None
        if end is not None and self._tail is not None:
            self._send_buffers(self._tail)
            outputs = self._with_tail(outputs, self._tail) if outputs is not None else None
        if outputs is not None:
            count = len(self._laws)
            kept = [tuple(None if i in separate else value for i, value in enumerate(part[:count])) for part in outputs]
            merged = merge_outputs(kept, sizes, self._laws)
            for index in separate:
                merged[index] = _Separate(part[index] for part in outputs)
            if end is not None and self._tail is not None:
                for index, value in zip(self._tail.cut.outputs, end.outputs):
                    merged[index] = _Separate([value]) if index in separate else value
        return StepResult(self._spread(merged, outputs_everywhere), sizes, self._laws, samples)

    def _with_tail(self, outputs: list[tuple[Any, ...]], tail: Tail) -> list[tuple[Any, ...]]:
        """The outputs of each micro-batch in the order of the recording; None where the tail makes them."""
        count = len(tail.kept) + len(tail.cut.outputs)
        return [tuple({**dict.fromkeys(range(count)), **dict(zip(tail.kept, part))}.values()) for part in outputs]

    def _send_buffers(self, tail: Tail) -> None:
        """What the tail has changed is read by other stages in the next step."""
        if self._groups is None or self._transport is None:
            return
        for name in tail.cut.buffers:
            buffer = resolve(self.recording.root, name)
            dist.broadcast(buffer.data, self._groups.rank_of_stage(self._last), group=self._groups.pipeline)

    def schedule(self, microbatches: int, forward: bool) -> Schedule:
        key = (microbatches, forward)
        if key not in self._schedules:
            self._schedules[key] = self._plan.make_schedule(microbatches, forward)
        return self._schedules[key]

    def open_window(self, batches: Sequence[Sequence[Any] | None]) -> Window | None:
        """The numbers of batches that are accumulated for one step of the optimizer, on the first stage.

        None stands for a batch that this recording does not hold for: then there is no window, in no replica. All
        replicas must call it together.
        """
        recording = self.recording
        counts = [
            self.weighed.numbers.counts(leaves, batch_size_of(leaves, batched_inputs(recording)))
            if leaves is not None
            else None
            for leaves in batches
        ]
        together = self._groups is not None and self.weighed.needs_totals(train=True)
        return open_window(counts, self._totals if together else None)

    def _prepare(
        self, leaves: Sequence[Any] | None, train: bool, window: Window | None, position: int
    ) -> tuple[StepInput, MicrobatchSizes, int, tuple[float | None, int | None]]:
        """Cut the batch on the first stage, and tell the others its form and its numbers."""
        header: Any = None
        microbatches = None
        if self._stage == self._first:
            assert leaves is not None
            names = [item.name for item in self.recording.inputs]
            kinds = {item.name: item.kind for item in self.recording.inputs}
            numbers = {name: leaf for name, leaf in zip(names, leaves) if kinds[name] == "number"}
            # A last batch that is smaller than the number of micro-batches runs with fewer of them.
            parts, sizes = cut_batch(self.recording, leaves, self._plan.microbatches)
            if set(sizes.sizes) != {self._plan.microbatch_size}:  # not what the plan was made for
                parts, sizes = fitting_cut(self.recording, leaves, self._plan.microbatches) or (parts, sizes)
            microbatches = [dict(zip(names, part)) for part in parts]
            tensors = [[leaf for leaf in part if isinstance(leaf, torch.Tensor)] for part in parts]
            forms = [tuple((tuple(t.shape), str(t.dtype)) for t in part) for part in tensors]
            together = self._groups is not None and self.weighed.needs_totals(train)
            batch = self.weighed.numbers(leaves, sizes.sizes, self._totals if together else None, window, position)
            ids = tuple(self._forms.setdefault(form, len(self._forms)) for form in forms)
            header = (sizes.sizes, ids, {**numbers, **batch.inputs}, batch.samples, (batch.denominator, batch.batches))
        if self._groups is not None and self._transport is not None:
            header = share(header, self._groups, self._transport, self._first, self._device)
        counts, forms, numbers, samples, divided = header
        sizes = MicrobatchSizes(counts)
        weights = (1.0,) * len(sizes) if self._in_graph else sizes.weights
        return StepInput(forms, weights, numbers, microbatches), sizes, samples, divided

    def _totals(self, values: Sequence[float]) -> list[float]:
        """Sums over the first stages of all replicas, in host memory."""
        assert self._groups is not None
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, group=self._groups.numbers)
        return [float(number) for number in numbers]

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
