"""Runs the action list of one stage. It decides nothing: order, partners and contents come from the plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pipepart.errors import PipelineError
from pipepart.recording import BATCH, Chunk, Edge
from pipepart.runtime.deferred import WeightWork, defer_weights, deferring
from pipepart.runtime.mailbox import Announced, Inbox, Outbox
from pipepart.runtime.messages import Routes, TensorSpec
from pipepart.runtime.recompute import RandomState, again
from pipepart.runtime.replicas import ReplicaMean
from pipepart.runtime.tail_run import TailStep
from pipepart.runtime.tracing import Trace
from pipepart.runtime.transport import Transport
from pipepart.schedule import Action, Message, Schedule, messages_of

__all__ = ["Executor", "StepInput"]


@dataclass(frozen=True)
class StepInput:
    """What one step works on. Only the first stage has the micro-batches; the rest is the same on every stage."""

    forms: tuple[int, ...]
    """Per micro-batch a number that stands for the shapes and types of its leaves."""
    weights: tuple[float, ...]
    """Per micro-batch what its loss counts; 1 if the weights are in the graph already."""
    numbers: Mapping[str, float | tuple[float, ...]]
    """Plain numbers of the batch (step counters, what the loss divides by) by input name; a tuple has one for each
    micro-batch."""
    microbatches: Sequence[Mapping[str, Any]] | None = None
    """Per micro-batch the leaves by input name; on the first stage only."""


@dataclass
class _Stash:
    """What a chunk keeps of a micro-batch between its forward and its backward."""

    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """Imported tensors whose gradients will be sent back, by edge name."""
    roots: dict[str, torch.Tensor] = field(default_factory=dict)
    """Exported tensors (or the loss) that gradients will come in for, by edge name."""
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    """The forms of these gradients."""
    rerun: tuple[list[Any], RandomState] | None = None
    """A chunk that recomputes keeps the arguments of its forward instead of what autograd would save."""


class Executor:
    """The stage's own chunks, and what it must know of the others to talk to them."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        routes: Routes,
        stage: int,
        transport: Transport | None,
        device: torch.device,
        loss_index: int | None,
        splits_backward: bool = False,
        recompute: Collection[int] = (),
        roots: Collection[int] = (),
    ) -> None:
        """`roots`: outputs that get their gradients from a tail, if the loss is not among them."""
        self._last = len(chunks) - 1
        self._chunks = {chunk.index: chunk for chunk in chunks if routes.placement[chunk.index] == stage}
        self._routes, self._stage, self._transport, self._device = routes, stage, transport, device
        self._roots = {"loss": loss_index} if loss_index is not None else {f"#{index}": index for index in roots}
        self._announced = Announced()
        self._recompute = frozenset(recompute)
        if splits_backward:
            for chunk in self._chunks.values():
                defer_weights(chunk.module)
        self._channels: dict[int, tuple[Schedule, Mapping[tuple[int, int], tuple[Message, ...]]]] = {}

    def run(
        self,
        schedule: Schedule,
        step: StepInput,
        loss_scale: float = 1.0,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        mean: ReplicaMean | None = None,
        trace: Trace | None = None,
        tail: TailStep | None = None,
        begin: Callable[[int], None] | None = None,
    ) -> list[tuple[Any, ...]] | None:
        """Execute one step. Returns the flat outputs of every micro-batch on the stage with the last chunk.

        There, `tail` runs after the last forward of the last chunk. `begin` is told the micro-batch of each action before
        it runs, and -1 before the tail.
        """
        work = _Step(self, schedule, step, loss_scale, context, trace, tail, begin)
        actions = schedule.actions[self._stage]
        last = {action.chunk: action for action in actions if action.kind in ("B", "W")} if mean is not None else {}
        with _collecting_later():
            for action in actions:
                if mean is None or last.get(action.chunk) != action:
                    work.perform(action)
                    continue
                with mean.last_backward(action.chunk) if action.kind == "B" else nullcontext():
                    work.perform(action)
                mean.chunk_is_final(action.chunk)
            work.finish()
        return work.outputs if self._last in self._chunks else None

    def channels(self, schedule: Schedule) -> Mapping[tuple[int, int], tuple[Message, ...]]:
        """The messages of each pair of stages in order; worked out once for each schedule object."""
        if id(schedule) not in self._channels:
            backward = frozenset() if schedule.forward_only else self._routes.backward_pairs
            self._channels[id(schedule)] = (
                schedule,
                messages_of(schedule, self._routes.forward_pairs, backward).channels,
            )
        return self._channels[id(schedule)][1]


@contextmanager
def _collecting_later() -> Iterator[None]:
    """No garbage collection between actions: each stage would stop at another time, and all others wait for it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Step:
    """The state of one step on one stage."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        step: StepInput,
        loss_scale: float,
        context: Callable[[], AbstractContextManager[Any]],
        trace: Trace | None,
        tail: TailStep | None,
        begin: Callable[[int], None] | None,
    ) -> None:
        self._traced, self._tail, self._begin = trace, tail, begin
        self._x, self._step, self._loss_scale, self._context = executor, step, loss_scale, context
        self._train = not schedule.forward_only
        self._routes = executor._routes
        self._stash: dict[tuple[int, int], _Stash] = {}
        self._weight_work: dict[tuple[int, int], WeightWork] = {}
        self._local_values: dict[tuple[int, int, int], list[Any]] = {}
        self._local_gradients: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self.outputs: list[tuple[Any, ...]] = [()] * schedule.microbatches
        expected = {s: m for (s, t), m in executor.channels(schedule).items() if t == executor._stage}
        leaving = any(s == executor._stage for s, _ in executor.channels(schedule))
        self._inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        self._handlers = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        if expected or leaving:
            assert executor._transport is not None
            common = (executor._transport, self._routes, executor._announced, step.forms, executor._device)
            self._inbox, self._outbox = Inbox(*common, expected, self._gradient_specs), Outbox(*common)

    def perform(self, action: Action) -> None:
        handler = self._handlers.get(action.kind)
        if handler is None:
            raise PipelineError(f"this runtime does not know the action {action} (kind {action.kind!r})")
        if self._begin is not None:
            self._begin(action.microbatch)
        handler(action)
        if self._inbox is not None:  # after the results have gone out: another stage may wait for them
            self._inbox.post_ahead()

    def finish(self) -> None:
        if self._outbox is not None:
            self._outbox.settle()
        assert not self._stash, f"no backward for {sorted(self._stash)}"
        assert not self._weight_work, f"no weight gradients for {sorted(self._weight_work)}"

    # ---- forward

    def _forward(self, action: Action) -> None:
        chunk = self._x._chunks[action.chunk]
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
        later = self._train and chunk.index in self._x._recompute
        if later:
            stash.rerun = (arguments, RandomState(self._x._device))
        with torch.set_grad_enabled(self._train and not later), self._context():
            results = chunk.module(*arguments)
        self._trace(action, started)
        if self._train:
            self._keep_roots(chunk, results, stash, forms_only=later)
            self._stash[(chunk.index, action.microbatch)] = stash
        if chunk.index == self._x._last:
            detached = (r.detach() if isinstance(r, torch.Tensor) else r for r in results)
            self.outputs[action.microbatch] = tuple(detached)
            if self._tail is not None and all(self.outputs):
                if self._begin is not None:
                    self._begin(-1)
                self._tail.run(self.outputs)
        else:
            exported = {edge.name: value for edge, value in zip(chunk.exports, results)}
            self._deliver(chunk, action.microbatch, {**values, **exported})

    def _keep_roots(self, chunk: Chunk, results: Sequence[Any], stash: _Stash, forms_only: bool = False) -> None:
        """The results that gradients will come in for: whole, or (recomputed later) their forms alone."""
        if chunk.index == self._x._last:
            roots = {name: results[index] for name, index in self._x._roots.items()}
        else:
            roots = {edge.name: value for edge, value in zip(chunk.exports, results) if edge.grad_targets}
        stash.specs = {name: TensorSpec(tuple(root.shape), root.dtype) for name, root in roots.items()}
        if not forms_only:
            stash.roots = roots

    def _imports(self, chunk: Chunk, microbatch: int) -> dict[str, Any]:
        """The values of all imports of a chunk, from the batch, from chunks on this stage, or from other stages."""
        values: dict[str, Any] = {}
        if chunk.index == 0:
            assert self._step.microbatches is not None, "the first stage has no batch"
            values.update(self._step.microbatches[microbatch])
        for edge in chunk.imports:
            if edge.source == BATCH and edge.kind == "number":
                number = self._step.numbers[edge.name]
                values[edge.name] = number[microbatch] if isinstance(number, tuple) else number
        for pair in self._routes.entering(chunk.index):
            if self._routes.local(pair):
                got = self._local_values.pop((*pair, microbatch))
            else:
                got = self._take(Message("F", *pair, microbatch))
            values.update(zip((edge.name for edge in self._routes.forward[pair]), got))
        return values

    def _deliver(self, chunk: Chunk, microbatch: int, values: Mapping[str, Any]) -> None:
        for pair in self._routes.leaving(chunk.index):
            edges = self._routes.forward[pair]
            content = [values[edge.name] for edge in edges]
            if self._routes.local(pair):
                key = (*pair, microbatch)
                detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in content]
                self._local_values[key] = detached
            else:
                message, started = Message("F", *pair, microbatch), self._now()
                assert self._outbox is not None
                self._outbox.send_values(message, edges, content)
                self._trace(message.send, started)

    # ---- backward

    def _backward(self, action: Action) -> None:
        chunk, microbatch = self._x._chunks[action.chunk], action.microbatch
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
        self._trace(action, started)
        for pair in reversed(self._routes.entering(chunk.index)):  # the order of `channels`: nearest chunk first
            edges = self._routes.gradients(pair)
            if edges:
                self._return_gradients(pair, edges, stash, microbatch)

    def _run_again(self, chunk: Chunk, stash: _Stash) -> None:
        assert stash.rerun is not None
        arguments, random_state = stash.rerun
        with again(chunk.module, random_state, self._x._device), torch.enable_grad(), self._context():
            self._keep_roots(chunk, chunk.module(*arguments), stash)

    def _weights(self, action: Action) -> None:
        """The weight gradients that `I` has left."""
        work = self._weight_work.pop((action.chunk, action.microbatch))
        started = self._now()
        for piece in work:
            piece()
        self._trace(action, started)

    def _gradients(self, chunk: Chunk, microbatch: int) -> dict[str, torch.Tensor]:
        """The gradient of each exported tensor: the sum over all chunks that used it."""
        if chunk.index == self._x._last and "loss" not in self._x._roots:
            assert self._tail is not None
            return {f"#{index}": gradient for index, gradient in self._tail.gradients[microbatch].items()}
        if chunk.index == self._x._last:
            spec = self._stash[(chunk.index, microbatch)].specs["loss"]
            scale = self._step.weights[microbatch] * self._loss_scale
            return {"loss": torch.full(spec.shape, scale, dtype=spec.dtype, device=self._x._device)}
        gradients: dict[str, torch.Tensor] = {}
        for pair in self._routes.leaving(chunk.index):
            edges = self._routes.gradients(pair)
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
            self._trace(message.send, started)

    def _gradient_specs(self, message: Message) -> tuple[TensorSpec, ...] | None:
        """The form of an expected gradient message: that of the tensors that went out. None before their forward ran."""
        stash = self._stash.get((message.target, message.microbatch))
        if stash is None:
            return None
        return tuple(stash.specs[edge.name] for edge in self._routes.gradients((message.target, message.source)))

    def _take(self, message: Message) -> list[Any]:
        assert self._inbox is not None
        started = self._now()
        values = self._inbox.take(message)
        self._trace(message.recv, started)
        return values

    def _now(self) -> Any:
        return self._traced.now() if self._traced is not None else None

    def _trace(self, action: Action, started: Any) -> None:
        if self._traced is not None:
            self._traced.add(action, started)
