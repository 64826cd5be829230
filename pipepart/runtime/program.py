"""One recorded step, ready to run on batches of any size."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from pipepart.devices import computes_on_host, synchronize
from pipepart.errors import PipelineError
from pipepart.recording.execution.draws import mix
from pipepart.recording.execution.ops_run import resolve
from pipepart.runtime.batch_norm import BatchStatistics
from pipepart.runtime.chunked_step import ChunkedStep, StageInputs, TailRun
from pipepart.runtime.compiled import compiled_chunks
from pipepart.runtime.deferred import defer_weights
from pipepart.runtime.executor import Executor, PreparedBatch, StageChunks, StepWork
from pipepart.runtime.mailbox import Routes
from pipepart.runtime.meeting import reduce_numbers
from pipepart.runtime.microbatch import (
    MicrobatchSizes,
    batch_size_of,
    batched_inputs,
    fitting_split,
    merge_outputs,
    split_batch,
)
from pipepart.runtime.pace import joined, pace_of
from pipepart.runtime.randomness import seeded
from pipepart.runtime.results import Results, Separate
from pipepart.runtime.sync import BorrowedParameters, BucketedSync
from pipepart.runtime.tracing import Trace
from pipepart.runtime.transport import Transport, broadcast, share
from pipepart.samples.batch_numbers import Window, open_window
from pipepart.samples.tail import Tail
from pipepart.schedule import Schedule

__all__ = ["Program", "StepRequest", "StepResult", "prepared"]


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A request for one step. All fields except `leaves` and `ahead` are the same on every stage."""

    leaves: Sequence[Any] | None
    """The leaves of the batch. Only the first stage reads them."""
    train: bool = True
    """Run forward and backward; else forward only."""
    outputs_everywhere: bool = False
    """Return all outputs on every stage; else tensors with a batch dimension are on the last stage only."""
    separate: Collection[int] = ()
    """Outputs that are not merged: the last stage gets the list over the micro-batches, other stages None."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of forwards (precision)."""
    draw_key: int | None = None
    """The key of this step for ops that draw random numbers; None: they draw from the stream of the stage."""
    loss_scale: float = 1.0
    """The factor of the loss in backward."""
    trace: bool = False
    """Measure the timeline of the step."""
    reduce: bool = True
    """Reduce the gradients over replicas; else they stay on this rank and are added to those of the next step."""
    continues: bool = False
    """The gradients so far are those of earlier batches of the same optimizer step."""
    ahead: Sequence[Sequence[Any] | None] = ()
    """With the first batch of an optimizer step, on the first stage: the leaves of the other batches, for losses with
    several denominators. None for a batch for which the recording does not hold."""
    made: Callable[[StepResult], Any] | None = None
    """In a series: called on the last stage when the outputs of the batch are final. Its value goes to all stages."""


@dataclass(frozen=True)
class StepResult:
    """The merged outputs of a step."""

    outputs: list[Any]
    """Flat outputs in the order of the recording. Scalars are on every stage; other tensors are on the last stage, and
    None elsewhere unless they were requested everywhere."""
    sizes: MicrobatchSizes
    laws: tuple[str, ...]
    """For each output the law by which values of micro-batches make up that of the batch (see `samples.weigh`)."""
    samples: int
    """Samples of the batch, or of all replicas if the step needed numbers of all of them."""
    made: Any = None
    """The value of `StepRequest.made`."""


class Program:
    """The chunks of one recorded step on this stage."""

    def __init__(
        self, step: ChunkedStep, inputs: StageInputs, transports: tuple[Transport, Transport] | None, results: Results
    ) -> None:
        """`transports`: for tensors, and for plain values in host memory; None in a replica of one stage."""
        transport, control = transports or (None, None)
        self.recording, self.weighed, plan = step.recording, step.weighed, inputs.plan
        self._tail, self.laws, self._plan = step.tail, step.laws, plan
        self._groups, self._control, self._device = inputs.groups, control, inputs.device
        self._stage, self._results = inputs.stage, results
        self._first, self._last = plan.placement[0], plan.placement[-1]
        body = self.weighed.recording
        self._weights_in_graph = body.loss_index is not None and self.weighed.laws[body.loss_index] == "sum"
        own = {chunk.index: chunk for chunk in step.chunks if plan.placement[chunk.index] == self._stage}
        halves = plan.make_schedule().splits_backward
        if halves:
            for chunk in own.values():
                defer_weights(chunk.module)
        self._compiled = compiled_chunks(list(own.values()), inputs.options, halves)
        settings = inputs.options.compile_settings
        self._trial = inputs.trial if settings is not None and settings.trial else None
        roots = {"loss": body.loss_index} if body.loss_index is not None else {f"#{i}": i for i in body.roots}
        self._recompute = recompute = frozenset(index for index, on in enumerate(plan.recompute) if on)
        routes = Routes.of(step.chunks, plan.placement)
        if transport is not None:
            transport.open(routes.channels)
        watching = inputs.groups.watching if inputs.groups is not None and not computes_on_host(inputs.device) else None
        self._executor = Executor(
            StageChunks(
                self._stage,
                self._compiled.chunks if self._compiled is not None else own,
                len(step.chunks) - 1,
                routes,
                roots,
                recompute,
                transport,
                control,
                inputs.device,
                watching,
            )
        )
        # The host waits once per step for a device. A stage that is first and last waits for the numbers of the batch already,
        # so it does not read the loss: scalars go from device to device.
        both = self._first == self._last and transport is not None and not computes_on_host(inputs.device)
        self._scalars_by_device = both and self.weighed.numbers.reads_batch
        self._in_step = inputs.numbers
        self._statistics = BatchStatistics(list(own.values())) if inputs.options.batch_norm == "batch" else None
        self.pace = pace_of(step, inputs)
        """The batches of an evaluation that run without a pause between them."""
        self._forms: dict[Any, int] = {}
        self._schedules: dict[tuple[int, bool], Schedule] = {}

    def run(
        self,
        request: StepRequest,
        batch: PreparedBatch,
        loss_scale: float = 1.0,
        sync: BucketedSync | None = None,
        trace: Trace | None = None,
        borrowed: BorrowedParameters | None = None,
    ) -> StepResult:
        """Run all micro-batches of a prepared batch."""
        train, sizes, context = request.train, batch.sizes, request.context
        tail = TailRun(self._tail, sizes.sizes, loss_scale, context, train) if self._tail is not None else None
        weights = (1.0,) * len(sizes) if self._weights_in_graph else sizes.weights
        key = request.draw_key if self.recording.draws else None
        full, started = set(sizes.sizes) == {self._plan.microbatch_size}, time.perf_counter()
        if self._compiled is not None:
            self._compiled.begin(batch.compiled)
            if train and full and batch.compiled:
                self._compiled.compile_at_once(self._recompute, context, self._device)
        with (
            self._statistics.one_update() if train and self._statistics is not None else nullcontext(),
            seeded(partial(mix, key), self._device) if key is not None else nullcontext() as seed,
        ):
            scales = tuple(weight * loss_scale for weight in weights)
            work = StepWork(batch, scales, context, sync=sync, borrowed=borrowed, trace=trace, tail=tail, seed=seed)
            outputs = self._executor.run(self._schedule(len(sizes), forward=not train), work)
        if self._trial is not None and self._trial.chosen is None and train and self._stage == self._first:
            synchronize(self._device)
            self._trial.took(time.perf_counter() - started, batch.compiled, full)
        if self._tail is not None:
            self._send_buffers(self._tail)
        merged = self._merged(outputs, sizes, request.separate, tail) if outputs is not None else None
        shown = self._results.meet(merged, request.outputs_everywhere, self._scalars_by_device)
        return StepResult(shown, sizes, self.laws, batch.samples)

    def forward(self, requests: Sequence[StepRequest], batches: Sequence[PreparedBatch]) -> list[list[Any] | None]:
        """Run the forward of prepared batches of a series, without a pause between them. No stage waits for the end of others.

        Returns the outputs of each batch on the last stage, and None elsewhere.
        """
        assert self._tail is None, "a tail needs all micro-batches of its batch"
        keys = [request.draw_key for request in requests if request.draw_key is not None and self.recording.draws]
        places = [(batch, index) for batch, prepared in enumerate(batches) for index in range(len(prepared.sizes))]

        def key_of(microbatch: int) -> int:
            batch, index = places[microbatch]
            return mix(keys[batch], index)

        if self._compiled is not None:
            self._compiled.begin(batches[0].compiled)
        with seeded(key_of, self._device) if keys else nullcontext() as seed:
            work = StepWork(joined(batches), (1.0,) * len(places), requests[0].context, seed=seed)
            outputs = self._executor.run(self._schedule(len(places), forward=True), work)
        if outputs is None:
            return [None] * len(batches)
        ends = accumulate(len(batch.sizes) for batch in batches)
        return [
            self._merged(outputs[end - len(batch.sizes) : end], batch.sizes, request.separate, None)
            for request, batch, end in zip(requests, batches, ends)
        ]

    def _schedule(self, microbatches: int, forward: bool) -> Schedule:
        key = (microbatches, forward)
        if key not in self._schedules:
            self._schedules[key] = self._plan.make_schedule(microbatches, forward)
        return self._schedules[key]

    # ---- before a step

    def open_window(self, batches: Sequence[Sequence[Any] | None]) -> Window | None:
        """Return the numbers of the batches of one optimizer step, on the first stage. All replicas must call it.

        None stands for a batch for which this recording does not hold; then no replica has a window.
        """
        batched = batched_inputs(self.recording)
        counts = [
            self.weighed.numbers.counts(leaves, batch_size_of(leaves, batched)) if leaves is not None else None
            for leaves in batches
        ]
        together = self._groups is not None and self.weighed.needs_totals(train=True)
        return open_window(counts, self._totals_in_step if together else None)

    def prepare(self, request: StepRequest, window: Window | None = None, position: int = 0) -> PreparedBatch:
        """Split the batch on the first stage, and send its form and its numbers to the other stages.

        `window`, on the first stage: the batches of this optimizer step, in which this batch has the index `position`.
        """
        if request.train and self.recording.loss_index is None:
            raise PipelineError(
                "there is no loss to train on: expected the step to return a scalar tensor that requires grad, a dict with "
                "'loss', or a tuple that starts with it. Use evaluate() for a forward without loss."
            )
        return self._shared(request, window, position)

    def _shared(self, request: StepRequest, window: Window | None, position: int) -> PreparedBatch:
        header: Any = None
        parts: list[dict[str, Any]] | None = None
        if self._stage == self._first:
            header, parts = self.split(request, window, position)
        if self._groups is not None and self._control is not None:
            header = share(header, self._groups, self._control, self._first)
        return prepared(header, parts)

    def split(
        self, request: StepRequest, window: Window | None = None, position: int = 0
    ) -> tuple[tuple[Any, ...], list[dict[str, Any]]]:
        """Split a batch on the first stage. Returns its form and its numbers, and the leaves of its micro-batches."""
        assert request.leaves is not None
        leaves = request.leaves
        names = [item.name for item in self.recording.inputs]
        numbers = {item.name: leaf for item, leaf in zip(self.recording.inputs, leaves) if item.kind == "number"}
        # A last batch that is smaller than the number of micro-batches runs with fewer of them.
        parts, sizes = split_batch(self.recording, leaves, self._plan.microbatches)
        if set(sizes.sizes) != {self._plan.microbatch_size}:  # other sizes than those of the plan
            parts, sizes = fitting_split(self.recording, leaves, self._plan.microbatches) or (parts, sizes)
        tensors = [[leaf for leaf in part if isinstance(leaf, torch.Tensor)] for part in parts]
        forms = [tuple((tuple(t.shape), str(t.dtype)) for t in part) for part in tensors]
        ids = tuple(self._forms.setdefault(form, len(self._forms)) for form in forms)
        together = self._groups is not None and self.weighed.needs_totals(request.train)
        totals = self._totals_in_step if request.train else self._totals
        batch = self.weighed.numbers(leaves, sizes.sizes, totals if together else None, window, position)
        numbers = {**numbers, **batch.inputs}
        compiled = self._is_compiled(request.train)
        header = (sizes.sizes, ids, numbers, batch.samples, batch.denominator, batch.batches, compiled)
        return header, [dict(zip(names, part)) for part in parts]

    def _is_compiled(self, train: bool) -> bool:
        """Return, on the first stage, whether the next step uses compiled chunks."""
        if self._trial is None:
            return True
        if not train:
            return bool(self._trial.chosen)
        return self._trial.of_next(self._totals_in_step if self._in_step is not None else None)

    def _totals(self, values: Sequence[float]) -> list[float]:
        """Return sums over the first stages of all replicas, in host memory."""
        assert self._groups is not None
        return self._summed(values, self._groups.numbers)

    def _totals_in_step(self, values: Sequence[float]) -> list[float]:
        """Return sums over the first stages of the replicas whose gradients are combined."""
        return self._summed(values, self._in_step)

    def _summed(self, values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
        assert self._groups is not None
        numbers = torch.tensor(values, dtype=torch.float64)
        reduce_numbers(numbers, self._groups, group, dist.ReduceOp.SUM)
        return [float(number) for number in numbers]

    # ---- after a step

    def _merged(
        self, outputs: list[tuple[Any, ...]], sizes: MicrobatchSizes, separate: Collection[int], tail: TailRun | None
    ) -> list[Any]:
        """Merge the outputs of all micro-batches and those of the tail, in the order of the recording."""
        count = len(self.laws)
        if self._tail is not None:
            known = [dict(zip(self._tail.kept, part)) for part in outputs]
            outputs = [tuple(part.get(index) for index in range(count)) for part in known]
        kept = [tuple(None if i in separate else value for i, value in enumerate(part[:count])) for part in outputs]
        merged = merge_outputs(kept, sizes, self.laws)
        for index in separate:
            merged[index] = Separate(part[index] for part in outputs)
        if tail is not None and self._tail is not None:
            for index, value in zip(self._tail.cut.outputs, tail.outputs):
                merged[index] = Separate([value]) if index in separate else value
        return merged

    def _send_buffers(self, tail: Tail) -> None:
        """Send the buffers that the tail has changed to other stages, which read them in the next step."""
        if self._groups is None or self._control is None:
            return
        for name in tail.cut.buffers:
            buffer = resolve(self.recording.root, name)
            broadcast(buffer.data, self._groups.rank_of_stage(self._last), self._groups.pipeline)


def prepared(header: tuple[Any, ...], microbatches: Sequence[dict[str, Any]] | None) -> PreparedBatch:
    """Return a batch from its header, which all stages have, and its micro-batches, which the first stage has."""
    counts, ids, numbers, samples, denominator, batches, compiled = header
    return PreparedBatch(MicrobatchSizes(counts), ids, numbers, samples, denominator, batches, microbatches, compiled)
