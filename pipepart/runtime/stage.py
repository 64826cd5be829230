"""What one rank holds of a pipeline: its chunks of every recorded step, its parameters, its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.capture import Chunk, Recording, split
from pipepart.cost import OpCosts
from pipepart.graph import OpGraph, op_graph
from pipepart.planning import Plan, transfer
from pipepart.runtime.failure import guarded
from pipepart.runtime.gradients import GradientSync, clip_grad_norm
from pipepart.runtime.header import share
from pipepart.runtime.mesh import Groups, release_groups
from pipepart.runtime.ownership import Ownership, drop_foreign_parameters, place_parameters
from pipepart.runtime.program import Program, StepResult
from pipepart.runtime.tracing import Trace, TraceBoard, clock_offset
from pipepart.runtime.transport import GroupTransport, Transport, choose_transport
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
        timeout: float,
        name: str,
        transport: str = "auto",
        costs: OpCosts | None = None,
        batch_norm: str = "microbatch",
    ) -> None:
        """`planned` is the recorded step that the plan was made for, under the name that it will be run by."""
        self.root, self.plan, self.groups, self.device = root, plan, groups, device
        self.graph, self.costs = graph, costs
        chunks = split(planned, dict(zip(plan.ops, plan.chunk_of)), len(plan.placement))
        self.ownership = Ownership.of(root, chunks, plan.placement)
        self.held_buffers = _held_buffers(chunks, self.ownership, plan.placement, self.stage)
        self._transport: Transport | None = None
        with guarded(groups):
            if groups is not None and plan.stages > 1:
                self._transport = choose_transport(transport, groups, device, timeout)
            uses = _uses(chunks, plan.placement, self.stage)
            self._sync = GradientSync(self.ownership, groups, timedelta(seconds=timeout), uses)
        weakref.finalize(self, _close, self._transport, list(self._sync._tied.values())).atexit = False
        self._name = name
        self._batch_norm = batch_norm
        self._programs = {name: self._program(planned, chunks)}
        self._fresh: dict[str, torch.Tensor] = {}
        self._local: dict[str, torch.Tensor] = {}
        """Gradients of steps that were not reduced."""
        self._traces = TraceBoard(plan.stages, groups, timeout)
        self._clock_offset: float | None = None
        self._hollow: dict[str, nn.Parameter] = {}
        """What stands in the place of the parameters of other stages; optimizers hold on to these objects."""
        if groups is not None:
            self._hollow = drop_foreign_parameters(root, self.ownership.held_by(self.stage))

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

    def add(self, name: str, recording: Recording) -> None:
        """Lay the plan over another recorded step of the same model (evaluation)."""
        graph = op_graph(recording)
        chunk_of = transfer(self.graph, self.plan.chunk_of, graph, len(self.plan.placement))
        chunks = split(recording, chunk_of, len(self.plan.placement))
        self._programs[name] = self._program(recording, chunks)

    def _program(self, recording: Recording, chunks: Sequence[Chunk]) -> Program:
        return Program(recording, chunks, self.plan, self.groups, self._transport, self.device, self._batch_norm)

    def has(self, name: str) -> bool:
        return name in self._programs

    def recording(self, name: str) -> Recording:
        return self._programs[name].recording

    def train(
        self,
        leaves: Sequence[Any] | None,
        *,
        name: str | None = None,
        loss_scale: float = 1.0,
        trace: bool = False,
        reduce: bool = True,
        outputs_everywhere: bool = False,
        separate: Collection[int] = (),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> StepResult:
        """Forward and backward of all micro-batches. The new gradients are kept apart until `hand_over`.

        With `reduce=False` they stay on this rank, and are added to those of the next step that reduces.
        """
        parameters = self.named_parameters()
        before = {
            name: p.grad for name, p in parameters.items() if p.grad is not None and p.grad is not self._local.get(name)
        }
        for key, parameter in parameters.items():
            parameter.grad = self._local.pop(key, None)
        if reduce:
            self._sync.begin(parameters)
        program = self._programs[name or self._name]
        try:
            with guarded(self.groups):
                marks = Trace(self.stage, self.device) if trace else None
                result = program.run(
                    leaves,
                    train=True,
                    loss_scale=loss_scale,
                    outputs_everywhere=outputs_everywhere,
                    separate=separate,
                    context=context,
                    mean=self._sync.mean if reduce else None,
                    trace=marks,
                )
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
    ) -> StepResult:
        with guarded(self.groups):
            return self._programs[name].run(
                leaves, train=False, outputs_everywhere=outputs_everywhere, separate=separate, context=context
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
        held = self.named_parameters()
        wanted = {id(p) for p in parameters}
        homed = set(self.ownership.homed_at(self.stage))
        clipped = [p for p in held.values() if id(p) in wanted]
        counted = [p for name, p in held.items() if id(p) in wanted and (self.groups is None or name in homed)]
        with guarded(self.groups):
            return clip_grad_norm(counted, clipped, max_norm, self.groups)

    # ---- the whole model

    def full_state_dict(self) -> dict[str, Any]:
        """All parameters and buffers by full name, on rank 0; empty elsewhere. Every rank must call it."""
        own = self.root.state_dict()
        if self.groups is None:
            return own
        with guarded(self.groups):
            mine = self._true_here(own)
            parts: list[Any] | None = [None] * self.plan.stages if self.stage == 0 else None
            dist.gather_object(mine, parts, self.groups.rank_of_stage(0), group=self.groups.pipeline)
        if self.groups.rank != 0 or parts is None:
            return {}
        merged = {name: value for part in parts for name, value in part.items()}
        return type(own)((name, merged.get(name, value)) for name, value in own.items())

    def own_state_dict(self) -> dict[str, Any]:
        """The entries of the state dict whose true value is on this stage."""
        state = self.root.state_dict()
        return state if self.groups is None else self._true_here(state)

    def _true_here(self, state: dict[str, Any]) -> dict[str, Any]:
        """The entries of a state dict whose true value is on this stage, names of ties included."""
        homed = set(self.ownership.homed_at(self.stage))
        objects = {id(p): name for name, p in self.root.named_parameters()}
        buffers = {id(b): name for name, b in self.root.named_buffers()}
        found = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            if name in state and objects[id(parameter)] in homed:
                found[name] = state[name].detach().cpu()
        for name, buffer in self.root.named_buffers(remove_duplicate=False):
            if name in state and self.ownership.buffers[buffers[id(buffer)]] == self.stage:
                found[name] = state[name].detach().cpu()
        if self.is_last:  # persistent states of metrics and the like are neither; they are kept where the steps end
            tensors = {name for name, _ in self.root.named_parameters(remove_duplicate=False)}
            tensors |= {name for name, _ in self.root.named_buffers(remove_duplicate=False)}
            found.update({name: value for name, value in state.items() if name not in tensors})
        return found

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Take this stage's part of a state dict of the whole model."""
        tensors = (
            *self.root.named_parameters(remove_duplicate=False), *self.root.named_buffers(remove_duplicate=False),
        )  # fmt: skip
        hollow = {name for name, tensor in tensors if tensor.is_meta}
        result = self.root.load_state_dict({n: v for n, v in state.items() if n not in hollow}, strict=False)
        missing = [name for name in result.missing_keys if name not in hollow]
        missing += [name for name in self.root.state_dict() if name in hollow and name not in state]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(
                f"the state dict does not fit {type(self.root).__name__}: missing {sorted(missing)}, "
                f"unexpected {sorted(result.unexpected_keys)}"
            )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole model on every rank for a moment (to record another step); afterwards each has its own part again."""
        self.make_whole()
        try:
            yield
        finally:
            place_parameters(self.root, self._hollow)

    def make_whole(self) -> None:
        """All parameters on every rank again."""
        if self.groups is None:
            return
        real = {
            name: nn.Parameter(torch.empty_like(parameter, device=self.device), requires_grad=parameter.requires_grad)
            for name, parameter in self._hollow.items()
        }
        place_parameters(self.root, real)
        with guarded(self.groups):
            for name, parameter in self.root.named_parameters():
                home = self.groups.rank_of_stage(self.ownership.parameters[name][0])
                dist.broadcast(parameter.data, home, group=self.groups.pipeline)
            self._make_buffers_whole(self.groups)

    def _make_buffers_whole(self, groups: Groups) -> None:
        """Buffers of a model that was built on the meta device: each stage has those that it uses."""
        lacking = {name for name, buffer in self.root.named_buffers() if buffer.is_meta}
        everywhere: list[set[str]] = [set()] * groups.mesh.stages
        dist.all_gather_object(everywhere, lacking, group=groups.pipeline)
        wanted = set().union(*everywhere)
        for name, buffer in list(self.root.named_buffers()):
            if name in wanted:
                real = torch.empty_like(buffer, device=self.device) if buffer.is_meta else buffer
                dist.broadcast(real, groups.rank_of_stage(self.ownership.buffers[name]), group=groups.pipeline)
                path, _, key = name.rpartition(".")
                self.root.get_submodule(path)._buffers[key] = real


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
