"""Execution of the action list of one stage. Order, partners and contents come from the plan; nothing is decided here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pipepart.devices import new_stream
from pipepart.errors import PipelineError, PlanError
from pipepart.recording import BATCH, Chunk, Edge
from pipepart.runtime.chunked_step import TailRun
from pipepart.runtime.deferred import WeightWork, deferring
from pipepart.runtime.mailbox import Forms, Inbox, Outbox, PlannedInbox, Routes, TensorSpec, Wire
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.runtime.randomness import RandomState, recomputing
from pipepart.runtime.sync import BorrowedParameters, BucketedSync
from pipepart.runtime.tracing import Trace
from pipepart.runtime.transport import Transport
from pipepart.runtime.watching import Watching
from pipepart.schedule import Action, Message, Messages, Schedule, check_channels, messages_of, receives_due

__all__ = ["Executor", "PreparedBatch", "StageChunks", "StepWork"]


@dataclass(frozen=True)
class StageChunks:
    """The chunks of one stage and their connections to other chunks."""

    stage: int
    chunks: Mapping[int, Chunk]
    """The chunks of this stage by index."""
    last: int
    """The index of the last chunk of the step, on any stage."""
    routes: Routes
    roots: Mapping[str, int]
    """Outputs of the last chunk that backward starts from, by name: the loss, or outputs with gradients from a tail."""
    recompute: frozenset[int]
    """Chunks that run their forward again before their backward."""
    transport: Transport | None
    control: Transport | None
    """The transport for plain values in host memory."""
    device: torch.device
    watching: Watching | None = None
    """The watch over this rank, which is told of each action."""


@dataclass(frozen=True)
class PreparedBatch:
    """A batch split into micro-batches on the first stage, and its numbers on all stages."""

    sizes: MicrobatchSizes
    forms: tuple[int, ...]
    """For each micro-batch a number for the shapes and types of its leaves."""
    numbers: Mapping[str, float | tuple[float, ...]]
    """Plain numbers of the batch (step counters, denominators) by input name; a tuple has one for each micro-batch."""
    samples: int
    denominator: float | None
    """The denominator of the loss; None if the loss has several."""
    batches: int | None
    """The number of batches whose denominators the loss is divided by together; None: this batch alone."""
    microbatches: Sequence[Mapping[str, Any]] | None
    """For each micro-batch the leaves by input name, on the first stage only."""
    compiled: bool = True
    """Whether compiled chunks are used, if the stage has any."""


@dataclass(frozen=True)
class StepWork:
    """The work of one step on one stage: the batch, and everything that is done along with its actions."""

    batch: PreparedBatch
    scales: tuple[float, ...]
    """For each micro-batch the factor of its loss."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of forwards (precision)."""
    sync: BucketedSync | None = None
    """The exchange with replicas, which is told when gradients are final; None if gradients are not reduced."""
    borrowed: BorrowedParameters | None = None
    """The parameters that come for this step from other replicas; None if all are here."""
    trace: Trace | None = None
    tail: TailRun | None = None
    """The tail, which runs after the last forward of the last chunk."""
    seed: Callable[[int], None] | None = None
    """Called with the micro-batch before each action, and with -1 before the tail."""


@dataclass
class _Stash:
    """The tensors that a chunk keeps for a micro-batch between forward and backward."""

    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """Imported tensors whose gradients are sent back, by edge name."""
    roots: dict[str, torch.Tensor] = field(default_factory=dict)
    """Exported tensors (or the loss) that receive gradients, by edge name."""
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    """The forms of the gradients that exported tensors receive, by edge name."""
    rerun: tuple[list[Any], RandomState] | None = None
    """The arguments of the forward of a chunk that recomputes."""


class Executor:
    """Runs steps of the chunks of one stage."""

    def __init__(self, stage: StageChunks) -> None:
        self._stage = stage
        self._known = Forms()
        self._receiving = new_stream(stage.device) if stage.transport is not None else None
        self._messages: dict[int, tuple[Schedule, Messages]] = {}

    def run(self, schedule: Schedule, work: StepWork) -> list[tuple[Any, ...]] | None:
        """Execute one step. Returns the flat outputs of every micro-batch on the stage of the last chunk."""
        step = _StepRun(self._stage, schedule, work, self._messages_of(schedule), self._known, self._receiving)
        actions, sync = schedule.actions[self._stage.stage], work.sync
        last = {action.chunk: action for action in actions if action.kind in ("B", "W")} if sync is not None else {}
        borrowed = work.borrowed
        if borrowed is not None:
            names = {index: chunk.parameters for index, chunk in self._stage.chunks.items()}
            borrowed.begin([action.chunk for action in actions], names)
        with _collecting_later():
            for place, action in enumerate(actions):
                if borrowed is not None:
                    borrowed.before(place)
                if sync is None or last.get(action.chunk) != action:
                    step.perform(action)
                else:
                    with sync.last_backward(action.chunk) if action.kind == "B" else nullcontext():
                        step.perform(action)
                    sync.chunk_is_final(action.chunk)
                if borrowed is not None:
                    borrowed.after(place)
            step.finish()
        return step.outputs if self._stage.last in self._stage.chunks else None

    def _messages_of(self, schedule: Schedule) -> Messages:
        """Return the messages of each pair of stages in order. They are computed once for each schedule."""
        if id(schedule) not in self._messages:
            routes = self._stage.routes
            backward = frozenset() if schedule.forward_only else routes.backward_pairs
            messages = messages_of(schedule, frozenset(routes.forward), backward)
            if self._stage.transport is not None and self._stage.transport.ahead is None:
                self._check_channels(schedule, messages)
            self._messages[id(schedule)] = (schedule, messages)
        return self._messages[id(schedule)][1]

    def _check_channels(self, schedule: Schedule, messages: Messages) -> None:
        """Refuse a schedule whose transfers would hang on devices. All ranks come to the same result."""
        routes = self._stage.routes
        tensors = {("F", *pair): len(edges) for pair, edges in routes.forward.items()}
        tensors |= {("B", b, a): len(edges) for (a, b), edges in routes.gradients.items()}
        stuck = check_channels(schedule, messages, tensors=tensors)
        if stuck is not None:
            raise PlanError(
                f"the schedule {schedule.name!r} would hang on devices:\n{stuck.describe()}\nUse another schedule."
            )


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Disable garbage collection during a step: stages would stop at different times, and all others would wait."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _StepRun:
    """The state of one step on one stage."""

    def __init__(
        self,
        stage: StageChunks,
        schedule: Schedule,
        work: StepWork,
        messages: Messages,
        known: Forms,
        receiving: torch.Stream | None,
    ) -> None:
        self._stage, self._work, self._routes = stage, work, stage.routes
        self._trace, self._tail, self._context = work.trace, work.tail, work.context
        self._train = not schedule.forward_only
        self._stash: dict[tuple[int, int], _Stash] = {}
        self._weight_work: dict[tuple[int, int], WeightWork] = {}
        self._local_values: dict[tuple[int, int, int], list[Any]] = {}
        self._local_gradients: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self.outputs: list[tuple[Any, ...]] = [()] * schedule.microbatches
        self._handlers = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        channels = messages.channels
        expected = {source: found for (source, target), found in channels.items() if target == stage.stage}
        self._inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        if expected or any(source == stage.stage for source, _ in channels):
            assert stage.transport is not None and stage.control is not None
            wire = Wire(stage.transport, stage.control, stage.routes, known, stage.device, work.batch.forms, receiving)
            self._outbox = Outbox(wire)
            if stage.transport.ahead is None:
                due = tuple(receives_due(messages.program[stage.stage]).values())
                self._inbox = PlannedInbox(wire, expected, self._gradient_specs, due)
            else:
                self._inbox = Inbox(wire, expected, self._gradient_specs)

    def perform(self, action: Action) -> None:
        """Execute one compute action, with the receives before it and the sends after it."""
        handler = self._handlers.get(action.kind)
        if handler is None:
            raise PipelineError(
                f"the schedule has the action {action} of the kind {action.kind!r}; expected one of {list(self._handlers)}. "
                "Use a schedule with these kinds only."
            )
        if self._stage.watching is not None:
            self._stage.watching.at(str(action))
        if self._work.seed is not None:
            self._work.seed(action.microbatch)
        handler(action)
        if self._inbox is not None:  # after the sends: another stage may wait for them
            self._inbox.post_ahead()

    def finish(self) -> None:
        """Wait for all sends and check that every forward had its backward."""
        if self._outbox is not None:
            self._outbox.finish()
        assert not self._stash, f"no backward for {sorted(self._stash)}"
        assert not self._weight_work, f"no weight gradients for {sorted(self._weight_work)}"

    # ---- forward

    def _forward(self, action: Action) -> None:
        chunk = self._stage.chunks[action.chunk]
        values = self._imports(chunk, action.microbatch)
        started = self._now()
        stash = _Stash()
        arguments = []
        for edge in chunk.imports:
            value = values[edge.name]
            if self._train and chunk.index in edge.grad_targets:
                value = value.detach().requires_grad_(True)
                stash.leaves[edge.name] = value
            arguments.append(value)
        later = self._train and chunk.index in self._stage.recompute
        if later:
            stash.rerun = (arguments, RandomState(self._stage.device))
        with torch.set_grad_enabled(self._train and not later), self._context():
            results = chunk.module(*arguments)
        self._mark(action, started)
        if self._train:
            self._keep_roots(chunk, results, stash, forms_only=later)
            self._stash[(chunk.index, action.microbatch)] = stash
        if chunk.index == self._stage.last:
            detached = (r.detach() if isinstance(r, torch.Tensor) else r for r in results)
            self.outputs[action.microbatch] = tuple(detached)
            if self._tail is not None and all(self.outputs):
                if self._work.seed is not None:
                    self._work.seed(-1)
                self._tail.run(self.outputs)
        else:
            exported = {edge.name: value for edge, value in zip(chunk.exports, results)}
            self._deliver(chunk, action.microbatch, {**values, **exported})

    def _keep_roots(self, chunk: Chunk, results: Sequence[Any], stash: _Stash, forms_only: bool = False) -> None:
        """Keep the results that receive gradients, or only their forms if the chunk recomputes."""
        if chunk.index == self._stage.last:
            roots = {name: results[index] for name, index in self._stage.roots.items()}
        else:
            roots = {edge.name: value for edge, value in zip(chunk.exports, results) if edge.grad_targets}
        stash.specs = {name: TensorSpec(tuple(root.shape), root.dtype) for name, root in roots.items()}
        if not forms_only:
            stash.roots = roots

    def _imports(self, chunk: Chunk, microbatch: int) -> dict[str, Any]:
        """Return all imports of a chunk: from the batch, from chunks on this stage, or from other stages."""
        values: dict[str, Any] = {}
        if chunk.index == 0:
            assert self._work.batch.microbatches is not None, "the first stage has no batch"
            values.update(self._work.batch.microbatches[microbatch])
        for edge in chunk.imports:
            if edge.source == BATCH and edge.kind == "number":
                number = self._work.batch.numbers[edge.name]
                values[edge.name] = number[microbatch] if isinstance(number, tuple) else number
        for pair in self._routes.entering[chunk.index]:
            if self._routes.local(pair):
                got = self._local_values.pop((*pair, microbatch))
            else:
                got = self._take(Message("F", *pair, microbatch))
            values.update(zip((edge.name for edge in self._routes.forward[pair]), got))
        return values

    def _deliver(self, chunk: Chunk, microbatch: int, values: Mapping[str, Any]) -> None:
        for pair in self._routes.leaving[chunk.index]:
            edges = self._routes.forward[pair]
            content = [values[edge.name] for edge in edges]
            if self._routes.local(pair):
                detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in content]
                key = (*pair, microbatch)
                self._local_values[key] = detached
            else:
                message, started = Message("F", *pair, microbatch), self._now()
                assert self._outbox is not None
                self._outbox.send_values(message, edges, content)
                self._mark(message.send, started)

    # ---- backward

    def _backward(self, action: Action) -> None:
        chunk, microbatch = self._stage.chunks[action.chunk], action.microbatch
        gradients = self._gradients(chunk, microbatch)
        started = self._now()
        stash = self._stash.pop((chunk.index, microbatch))
        if stash.rerun is not None:
            self._run_again(chunk, stash)
        pairs = [
            (root, gradients[name]) for name, root in stash.roots.items() if name in gradients and root.requires_grad
        ]
        with deferring() if action.kind == "I" else nullcontext() as work:
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        if work is not None:
            self._weight_work[(chunk.index, microbatch)] = work
        self._mark(action, started)
        for pair in reversed(self._routes.entering[chunk.index]):  # the order of `channels`: nearest chunk first
            edges = self._routes.gradients[pair]
            if edges:
                self._return_gradients(pair, edges, stash, microbatch)

    def _run_again(self, chunk: Chunk, stash: _Stash) -> None:
        assert stash.rerun is not None
        arguments, random_state = stash.rerun
        with recomputing(chunk.module, random_state, self._stage.device), torch.enable_grad(), self._context():
            self._keep_roots(chunk, chunk.module(*arguments), stash)

    def _weights(self, action: Action) -> None:
        """Compute the weight gradients that `I` has deferred."""
        work = self._weight_work.pop((action.chunk, action.microbatch))
        started = self._now()
        for piece in work:
            piece()
        self._mark(action, started)

    def _gradients(self, chunk: Chunk, microbatch: int) -> dict[str, torch.Tensor]:
        """Return the gradient of each exported tensor: the sum over all chunks that use it."""
        if chunk.index == self._stage.last and "loss" not in self._stage.roots:
            assert self._tail is not None
            return {f"#{index}": gradient for index, gradient in self._tail.gradients[microbatch].items()}
        if chunk.index == self._stage.last:
            spec = self._stash[(chunk.index, microbatch)].specs["loss"]
            scale = self._work.scales[microbatch]
            return {"loss": torch.full(spec.shape, scale, dtype=spec.dtype, device=self._stage.device)}
        gradients: dict[str, torch.Tensor] = {}
        for pair in self._routes.leaving[chunk.index]:
            edges = self._routes.gradients[pair]
            if not edges:
                continue
            if self._routes.local(pair):
                got = self._local_gradients.pop((*pair, microbatch))
            else:
                got = self._take(Message("B", pair[1], pair[0], microbatch))
            for edge, gradient in zip(edges, got):
                gradients[edge.name] = gradients[edge.name] + gradient if edge.name in gradients else gradient
        return gradients

    def _return_gradients(self, pair: tuple[int, int], edges: Sequence[Edge], stash: _Stash, microbatch: int) -> None:
        content = []
        for edge in edges:
            leaf = stash.leaves[edge.name]
            content.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        if self._routes.local(pair):
            key = (*pair, microbatch)
            self._local_gradients[key] = content
        else:
            message, started = Message("B", pair[1], pair[0], microbatch), self._now()
            assert self._outbox is not None
            self._outbox.send_gradients(message, content)
            self._mark(message.send, started)

    def _gradient_specs(self, message: Message) -> tuple[TensorSpec, ...] | None:
        """Return the forms of a backward message, which are those of the exported tensors; None before their forward."""
        stash = self._stash.get((message.target, message.microbatch))
        if stash is None:
            return None
        return tuple(stash.specs[edge.name] for edge in self._routes.gradients[(message.target, message.source)])

    def _take(self, message: Message) -> list[Any]:
        assert self._inbox is not None
        started = self._now()
        values = self._inbox.take(message)
        self._mark(message.recv, started)
        return values

    def _now(self) -> Any:
        return self._trace.now() if self._trace is not None else None

    def _mark(self, action: Action, started: Any) -> None:
        if self._trace is not None:
            self._trace.add(action, started)
