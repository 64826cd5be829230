"""What one rank holds of a pipeline: its chunks of every recorded step, its parameters, its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.cost import OpCosts
from pipepart.graph import OpGraph, op_graph
from pipepart.options import Options
from pipepart.planning import Plan, transfer
from pipepart.recording import Chunk, Recording
from pipepart.runtime.accumulation import Accumulation
from pipepart.runtime.failure import guarded
from pipepart.runtime.gradients import GradientSync, clip_grad_norm, gradient_norm
from pipepart.runtime.header import share
from pipepart.runtime.laying import Laid, lay_out
from pipepart.runtime.leaving import release_groups, released_with
from pipepart.runtime.mesh import Groups
from pipepart.runtime.ownership import Ownership
from pipepart.runtime.parts import Parts
from pipepart.runtime.program import Program, StepResult
from pipepart.runtime.randomness import OpSeeds
from pipepart.runtime.tracing import Trace, TraceBoard, TracePolicy, clock_offset
from pipepart.runtime.transport import GroupTransport, Transport, choose_transport
from pipepart.samples import Weighed
from pipepart.samples.numbers import DIFFERENT_RECORDINGS, EqualWeights, Window
from pipepart.samples.tail import TailCut
from pipepart.schedule import Timeline

__all__ = ["StageRuntime"]


class StageRuntime:
    """Runs recorded steps of one model over the stages of a plan. `Pipeline` and the Lightning strategy build on it."""

    def __init__(
        self,
        root: nn.Module,
        plan: Plan,
        graph: OpGraph,
        planned: Recording,
        groups: Groups | None,
        device: torch.device,
        name: str,
        options: Options,
        costs: OpCosts | None = None,
        cut: TailCut | None = None,
        averaged: Collection[int] = (),
    ) -> None:
        """`planned` is the recorded step that the plan was made for, under the name that it will be run by.

        `cut`: where its tail begins, which runs once per batch on the last stage. `averaged`: outputs of it whose values
        are averaged over replicas after the step.
        """
        self.root, self.plan, self.groups, self.device = root, plan, groups, device
        self.graph, self.costs, self.options = graph, costs, options
        laid = self._lay_out(planned, dict(zip(plan.ops, plan.chunk_of)), cut, averaged)
        chunks = laid.chunks
        self.ownership = Ownership.of(root, chunks, plan.placement)
        self.held_buffers = _held_buffers(chunks, self.ownership, plan.placement, self.stage)
        if self.is_first:
            self.held_buffers |= set(laid.weighed.numbers.buffers)
        self._transport: Transport | None = None
        with guarded(groups):
            if groups is not None and plan.stages > 1:
                self._transport = choose_transport(options.transport, groups, device, options.timeout)
            uses = _uses(chunks, plan.placement, self.stage)
            self._sync = GradientSync(self.ownership, groups, timedelta(seconds=options.timeout), uses)
        released_with(self, _close, self._transport, list(self._sync._tied.values()))
        self._name = name
        self._programs = {name: self._program(laid)}
        self._accumulation = Accumulation()
        self._window: Window | None = None
        """On the first stage: the batches that are accumulated, if their numbers are needed together."""
        self._position = 0
        self._fresh: dict[str, torch.Tensor] = {}
        self._local: dict[str, torch.Tensor] = {}
        """Gradients of steps that were not reduced."""
        self.tracing = TracePolicy()
        """Which steps are to be run with `trace=True`."""
        self._traces = TraceBoard(plan.stages, groups, options.timeout)
        self._clock_offset: float | None = None
        self.seeds = OpSeeds(options.randomness, groups.replica if groups is not None else 0)
        self.parts = Parts(root, self.ownership, groups, device, self.held_buffers, plan.placement[-1])

    @property
    def stage(self) -> int:
        return self.groups.stage if self.groups is not None else 0

    @property
    def timeline(self) -> Timeline | None:
        """The measured timeline of the last traced step, of all stages of this replica. A rank can ask for it alone."""
        return self._traces.timeline()

    @property
    def is_first(self) -> bool:
        """This stage reads the batch."""
        return self.stage == self.plan.placement[0]

    @property
    def is_last(self) -> bool:
        """Outputs of the steps come to light on this stage."""
        return self.stage == self.plan.placement[-1]

    # ---- steps

    def add(self, name: str, recording: Recording, cut: TailCut | None = None, averaged: Collection[int] = ()) -> None:
        """Lay the plan over another recorded step of the same model (evaluation)."""
        graph = op_graph(recording)
        chunk_of = transfer(self.graph, self.plan.chunk_of, graph, len(self.plan.placement))
        self._programs[name] = self._program(self._lay_out(recording, chunk_of, cut, averaged))

    def _lay_out(
        self, recording: Recording, chunk_of: Mapping[str, int], cut: TailCut | None, averaged: Collection[int]
    ) -> Laid:
        return lay_out(recording, chunk_of, cut, averaged, self.plan, self.options, self.device)

    def _program(self, laid: Laid) -> Program:
        return Program(laid, self.plan, self.groups, self._transport, self.device, self.options)

    def drop(self, name: str) -> None:
        """Forget a recorded step that is not needed any more."""
        self._programs.pop(name, None)

    def has(self, name: str) -> bool:
        return name in self._programs

    def recording(self, name: str) -> Recording:
        return self._programs[name].recording

    def weighed(self, name: str) -> Weighed:
        """How outputs of micro-batches make up those of the batch."""
        return self._programs[name].weighed

    def train(
        self,
        leaves: Sequence[Any] | None,
        *,
        name: str | None = None,
        loss_scale: float = 1.0,
        trace: bool = False,
        reduce: bool = True,
        continues: bool = False,
        ahead: Sequence[Sequence[Any] | None] = (),
        outputs_everywhere: bool = False,
        separate: Collection[int] = (),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        draw_key: int | None = None,
    ) -> StepResult:
        """Forward and backward of all micro-batches. The new gradients are kept apart until `hand_over`.

        With `reduce=False` they stay on this rank, and are added to those of the next step that reduces. `continues`:
        the gradients that are there already are of earlier batches of the same optimizer step. `ahead`, with the first of
        them: the leaves of the others on the first stage (None: the recording does not hold for that batch), for losses
        whose terms are divided by different numbers.
        """
        parameters = self.named_parameters()
        before = {
            name: p.grad for name, p in parameters.items() if p.grad is not None and p.grad is not self._local.get(name)
        }
        for key, parameter in parameters.items():
            parameter.grad = self._local.pop(key, None)

        def rescale(denominator: float | None, batches: int | None) -> float:
            kept, fresh = self._accumulation.add(denominator, continues, batches)
            if kept != 1.0:
                waiting = [*before.values(), *(p.grad for p in parameters.values() if p.grad is not None)]
                with torch.no_grad():
                    for gradient in waiting:  # a stage may have none
                        gradient.mul_(kept)
            return fresh

        if reduce:
            self._sync.begin(parameters)
        program = self._programs[name or self._name]
        try:
            with guarded(self.groups):
                marks = Trace(self.stage, self.device) if trace else None
                if not continues:
                    self._window, self._position = None, 0
                    if ahead and self.is_first:
                        self._window = program.open_window([leaves, *ahead])
                        if self._window is None:
                            warnings.warn(DIFFERENT_RECORDINGS, EqualWeights, stacklevel=2)
                result = program.run(
                    leaves,
                    train=True,
                    loss_scale=loss_scale,
                    outputs_everywhere=outputs_everywhere,
                    separate=separate,
                    context=context,
                    mean=self._sync.mean if reduce else None,
                    trace=marks,
                    rescale=rescale,
                    draw_key=draw_key,
                    window=self._window,
                    position=self._position,
                )
                self._position += 1
                if reduce:
                    self._sync.reduce(parameters, marks)
                if marks is not None:
                    self._traces.post(marks, self._offset())
            made = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            self._fresh, self._local = (made, {}) if reduce else ({}, made)
        finally:
            for key, parameter in parameters.items():
                parameter.grad = before.get(key)
        return result

    @torch.no_grad()
    def hand_over(self, show_own: bool = False) -> None:
        """Add the gradients of the last step to `.grad`, as a backward in one process would.

        With `show_own`, gradients of steps that were not reduced can be looked at in `.grad`; they are this rank's own.
        """
        parameters = self.named_parameters()
        if show_own:
            for name, gradient in self._local.items():
                parameters[name].grad = gradient
        for name, gradient in self._fresh.items():
            parameter = parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._fresh = {}

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last step by name, which are then not handed over."""
        taken, self._fresh, self._local = {**self._local, **self._fresh}, {}, {}
        return taken

    def drop_gradients(self) -> list[torch.Tensor]:
        """Take the gradients of the last step back, before they are handed over."""
        dropped, self._fresh, self._local = [*self._fresh.values(), *self._local.values()], {}, {}
        return dropped

    def evaluate(
        self,
        name: str,
        leaves: Sequence[Any] | None,
        *,
        outputs_everywhere: bool = True,
        separate: Collection[int] = (),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        draw_key: int | None = None,
    ) -> StepResult:
        with guarded(self.groups):
            return self._programs[name].run(
                leaves,
                train=False,
                outputs_everywhere=outputs_everywhere,
                separate=separate,
                context=context,
                draw_key=draw_key,
            )

    def from_last(self, value: Any) -> Any:
        """A plain value of the last stage on all stages of the replica. Every stage must call it."""
        return self._from(value, self.plan.placement[-1])

    def from_first(self, value: Any) -> Any:
        """A plain value of the stage that reads the batch on all stages of the replica. Every stage must call it."""
        return self._from(value, self.plan.placement[0])

    def _from(self, value: Any, stage: int) -> Any:
        if self.groups is None or self._transport is None:
            return value
        with guarded(self.groups):
            return share(value, self.groups, self._transport, stage, self.device)

    def _offset(self) -> float:
        """From this process's clock to that of stage 0; processes of one host share the monotonic clock."""
        if self._clock_offset is None:
            far = self.groups is not None and isinstance(self._transport, GroupTransport)
            self._clock_offset = clock_offset(self.groups) if far and self.groups is not None else 0.0
        return self._clock_offset

    # ---- parameters

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage holds, by full name."""
        found = {name: module._parameters[key] for name, module, key in self._places}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    @cached_property
    def _places(self) -> list[tuple[str, nn.Module, str]]:
        """Where these parameters hang. Every step asks for them, and to walk through a deep tree takes long."""
        held = set(self.ownership.held_by(self.stage)) if self.groups is not None else None
        names = [name for name, _ in self.root.named_parameters() if held is None or name in held]
        split_names = [(name, *name.rpartition(".")[::2]) for name in names]
        return [(name, self.root.get_submodule(path), key) for name, path, key in split_names]

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip `parameters` (those of the whole model; what is elsewhere is left out) by their norm over all stages."""
        wanted = {id(p) for p in parameters}
        clipped = [p for p in self.named_parameters().values() if id(p) in wanted]
        counted = [p for p in self._counted() if id(p) in wanted]
        with guarded(self.groups):
            return clip_grad_norm(counted, clipped, max_norm, self.groups, self.device)

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients of the whole model. Every stage must call it."""
        with guarded(self.groups):
            return gradient_norm(self._counted(), self.groups, self.device)

    def _counted(self) -> list[nn.Parameter]:
        """The parameters that this stage adds to a sum over the model: of those that stages share, one stage counts them."""
        held = self.named_parameters()
        homed = set(held) if self.groups is None else set(self.ownership.homed_at(self.stage))
        return [parameter for name, parameter in held.items() if name in homed]

    # ---- the whole model

    def full_state_dict(self) -> dict[str, Any]:
        """All parameters and buffers by full name, on rank 0; empty elsewhere. Every rank must call it."""
        return self.parts.full_state_dict()

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Take this stage's part of a state dict of the whole model."""
        self.parts.load_full_state_dict(state, strict)


def _close(transport: Transport | None, groups: Sequence[dist.ProcessGroup]) -> None:
    """Nobody uses this runtime any more: give its sockets back."""
    if transport is not None and hasattr(transport, "close"):
        transport.close()
    release_groups(groups)


def _held_buffers(
    chunks: Sequence[Chunk], ownership: Ownership, placement: Sequence[int], stage: int
) -> frozenset[str]:
    """The buffers that the chunks of a stage use, and those whose true value is there."""
    used = {name for chunk in chunks if placement[chunk.index] == stage for name in chunk.buffers}
    return frozenset(used | {name for name, home in ownership.buffers.items() if home == stage})


def _uses(chunks: Sequence[Chunk], placement: Sequence[int], stage: int) -> dict[str, list[int]]:
    """The chunks of a stage that use each of its parameters."""
    found: dict[str, list[int]] = {}
    for chunk in chunks:
        if placement[chunk.index] == stage:
            for name in chunk.parameters:
                found.setdefault(name, []).append(chunk.index)
    return found
