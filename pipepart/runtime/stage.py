"""The stage of one rank: runs its chunks of every recorded step, and holds its parameters and their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.graph import op_graph
from pipepart.planning import transfer
from pipepart.planning.sync_memory import gather_of
from pipepart.recording import Recording
from pipepart.runtime.chunked_step import ChunkedStep, RecordedStep, StageInputs, chunk_step
from pipepart.runtime.executor import PreparedBatch
from pipepart.runtime.failure import guarded
from pipepart.runtime.gradients import Accumulation
from pipepart.runtime.kept_attributes import KeptAttributes
from pipepart.runtime.leaving import release_groups, released_with
from pipepart.runtime.mesh import Groups
from pipepart.runtime.parameter_hooks import check_hooks
from pipepart.runtime.parameters import StageParameters
from pipepart.runtime.parts import Ownership, Parts
from pipepart.runtime.program import Program, StepRequest, StepResult
from pipepart.runtime.randomness import OpSeeds
from pipepart.runtime.replica_norm import ReplicaStatistics
from pipepart.runtime.results import Results
from pipepart.runtime.series import Series
from pipepart.runtime.tracing import Trace, TraceBoard, TracePolicy
from pipepart.runtime.transport import (
    DeviceTransport,
    GroupTransport,
    Posts,
    Transport,
    choose_transport,
    control_of,
    received,
    share,
)
from pipepart.samples import Weighed
from pipepart.samples.batch_numbers import DIFFERENT_RECORDINGS, EqualWeights, Window
from pipepart.schedule import Timeline

__all__ = ["StageRuntime"]

_TOLD = 32
"""The values that the first stage may have told before the other stages have them."""


class Steps:
    """Runs the recorded steps of one stage."""

    def __init__(
        self,
        inputs: StageInputs,
        transports: tuple[Transport, Transport] | None,
        parameters: StageParameters,
        traces: TraceBoard,
    ) -> None:
        """`transports`: for tensors, and for plain values in host memory."""
        self._inputs, self._transports, self._parameters, self._traces = inputs, transports, parameters, traces
        self.results = Results(
            inputs.groups, transports[1] if transports is not None else None, inputs.plan.placement[-1], inputs.device
        )
        """The way of outputs from the last stage to the others."""
        self._headers: Posts | None = None
        """The messages of the first stage, which may be some batches ahead of the others."""
        self.programs: dict[str, Program] = {}
        """The recorded steps by name."""
        self.statistics: ReplicaStatistics | None = None
        """The BatchNorm layers that share their statistics over replicas; None if they do not."""
        self.kept = KeptAttributes(inputs.root, inputs.groups, inputs.device)
        """The tensors that steps keep as attributes of modules."""
        self._accumulation = Accumulation()
        self._window: Window | None = None
        """The batches of the current optimizer step, on the first stage, if the loss needs their numbers together."""
        self._position = 0

    def add(self, name: str, step: ChunkedStep) -> None:
        """Make a step ready to run under this name."""
        self.programs[name] = Program(step, self._inputs, self._transports, self.results)
        self.kept.add(step, {i for i, stage in enumerate(self._inputs.plan.placement) if stage == self._inputs.stage})

    def train(self, name: str, request: StepRequest) -> StepResult:
        """Run forward and backward of all micro-batches. `StageParameters` keeps the new gradients until `hand_over`."""
        program, sync = self.programs[name], self._parameters.sync
        with self._parameters.step(request.reduce) as gradients, guarded(self._inputs.groups):
            trace = Trace(self._inputs.stage, self._inputs.device) if request.trace else None
            if not request.continues:
                self._window, self._position = self._open_window(program, request), 0
            batch = program.prepare(request, self._window, self._position)
            self._position += 1
            earlier, new = self._accumulation.add(batch.denominator, request.continues, batch.batches)
            gradients.scale_earlier(earlier)
            if len(batch.sizes) > 1 or self._inputs.plan.replicas > 1:
                check_hooks(gradients.parameters)
            replicas = sync.replicas if request.reduce else None
            if replicas is not None:
                # One number that adds up, and no numbers of the whole batch inside the terms of the loss.
                one = program.weighed.numbers.divides_by_sum and not program.weighed.notes
                replicas.weigh(self._accumulation.denominator if one else None)
            with self._shared(program, batch):
                scale, borrowed = request.loss_scale * new, sync.borrowed
                result = program.run(request, batch, scale, replicas, trace, borrowed)
            if request.reduce:
                sync.reduce(gradients.parameters, trace)
            if trace is not None:
                self._traces.post(trace)
        return result

    def _open_window(self, program: Program, request: StepRequest) -> Window | None:
        if not request.ahead or not self._inputs.is_first:
            return None
        window = program.open_window([request.leaves, *request.ahead])
        if window is None:
            warnings.warn(DIFFERENT_RECORDINGS, EqualWeights, stacklevel=4)
        return window

    def evaluate(self, name: str, request: StepRequest) -> StepResult:
        """Run the forward of all micro-batches."""
        program = self.programs[name]
        self._settle(program)
        with guarded(self._inputs.groups), self._parameters.values_here():
            batch = program.prepare(request)
            with self._shared(program, batch):
                return program.run(request, batch)

    def series(self, name: str) -> Series | None:
        """Begin a series of a recorded step; None if its batches run alone. All stages of the replica must call it together."""
        program, groups, plan = self.programs[name], self._inputs.groups, self._inputs.plan
        if not program.pace.in_series or groups is None or self._transports is None:
            return None
        if self._parameters.borrowed is not None and not self._parameters.borrowed.shown:
            return None  # values are here for one batch only
        self._settle(program)
        if program.pace.ahead:
            with guarded(groups):
                self.results.open_lane(self._transports[0])
        headers = self._posts(groups, self._transports[1])
        versions = self._parameters.versions
        return Series(program, groups, self._transports[1], headers, self.results, plan.placement[0], versions)

    def _settle(self, program: Program) -> None:
        """Prepare for an evaluation in which replicas wait for each other, since it needs numbers of all of them."""
        if program.weighed.needs_totals(False):
            self._parameters.settle()

    def _shared(self, program: Program, batch: PreparedBatch) -> AbstractContextManager[None]:
        """Share batch statistics over replicas inside, also in forwards of a training step that have no loss."""
        if self.statistics is None or not program.recording.training:
            return nullcontext()
        return self.statistics.shared(program.recording, len(batch.sizes))

    def tell(self, value: Any, source: int) -> Any:
        """Return the plain value of stage `source` on all stages, which may be some calls behind it."""
        groups = self._inputs.groups
        if groups is None or self._transports is None:
            return value
        with guarded(groups):
            if groups.stage != source:
                return received(groups, self._transports[1], source)
            others = [stage for stage in range(groups.mesh.stages) if stage != source]
            self._posts(groups, self._transports[1]).send(value, others, _TOLD)
        return value

    def _posts(self, groups: Groups, control: Transport) -> Posts:
        if self._headers is None:
            self._headers = Posts(groups, control)
        return self._headers

    def share(self, value: Any, source: int) -> Any:
        """Return the plain value of stage `source` on all stages of the replica. Every stage must call it."""
        groups = self._inputs.groups
        if groups is None or self._transports is None:
            return value
        with guarded(groups):
            return share(value, groups, self._transports[1], source)


class StageRuntime:
    """The stage of this rank, for `Pipeline` and the Lightning strategy.

    `parts` is the part of the model on this rank, `parameters` has its parameters and gradients, `steps` runs recorded
    steps, and `traces` has the measured timelines.
    """

    def __init__(self, inputs: StageInputs) -> None:
        """All ranks must call it together."""
        plan, groups, options = inputs.plan, inputs.groups, inputs.options
        self._inputs = inputs
        self.root, self.plan, self.graph, self.costs = inputs.root, plan, inputs.graph, inputs.costs
        self.groups, self.device, self.options = groups, inputs.device, options
        self.stage, self.is_first = inputs.stage, inputs.is_first
        chunked = chunk_step(inputs.step, dict(zip(plan.ops, plan.chunk_of)), inputs)
        self.ownership = Ownership.of(self.root, chunked.chunks, plan.placement)
        self.held_buffers = self.ownership.buffers_held_by(self.stage)
        """The buffers that this stage holds."""
        if self.is_first:
            self.held_buffers |= set(chunked.weighed.numbers.buffers)
        transports: tuple[Transport, Transport] | None = None
        with guarded(groups):
            if groups is not None and plan.stages > 1:
                transport = choose_transport(options.transport, groups, self.device, options.timeout)
                transports = transport, control_of(transport)
            mode = gather_of(options.sync_mode, plan)
            self.parameters = StageParameters(self.root, self.ownership, groups, self.device, mode)
        self._inputs = inputs = replace(inputs, numbers=self.parameters.sync.numbers)
        self._transport = transports[0] if transports is not None else None
        released_with(self, _close, transports or (), self.parameters.sync.groups)
        one_clock = transports is None or not isinstance(transports[1], GroupTransport)
        self.traces = TraceBoard(plan.stages, groups, options.timeout, one_clock)
        self.tracing = TracePolicy()
        """Selects the steps that are run with ``trace=True``."""
        self.steps = Steps(inputs, transports, self.parameters, self.traces)
        released_with(self, self.steps.results.close)
        self.steps.add(inputs.step.name, chunked)
        self.seeds = OpSeeds(options.randomness, groups.replica if groups is not None else 0)
        self.parts = Parts(
            self.root,
            self.ownership,
            groups,
            self.device,
            self.held_buffers,
            plan.placement[-1],
            self.parameters.borrowed,
        )

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the outputs of steps."""
        return self.stage == self.plan.placement[-1]

    @property
    def timeline(self) -> Timeline | None:
        """The measured timeline of the last traced step, of all stages of this replica. A rank can read it alone."""
        return self.traces.timeline()

    # ---- recorded steps

    def add(self, step: RecordedStep) -> None:
        """Apply the plan to another recorded step of the same model, for example an evaluation."""
        chunk_of = transfer(self.graph, self.plan.chunk_of, op_graph(step.recording), len(self.plan.placement))
        self.steps.add(step.name, chunk_step(step, chunk_of, self._inputs))

    def end_set_up(self) -> None:
        """Note that steps which are added from now on may be added by one replica alone."""
        if isinstance(self._transport, DeviceTransport):
            self._transport.seal()

    def drop(self, name: str) -> None:
        """Remove a recorded step."""
        self.steps.programs.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether there is a recorded step of this name."""
        return name in self.steps.programs

    def recording(self, name: str) -> Recording:
        """Return the recording of a step."""
        return self.steps.programs[name].recording

    def laws(self, name: str) -> tuple[str, ...]:
        """Return the law of each output of a step; see `StepResult.laws`."""
        return self.steps.programs[name].laws

    def weighed(self, name: str) -> Weighed:
        """Return the recording of a step with the weights of the whole batch."""
        return self.steps.programs[name].weighed

    def train(self, request: StepRequest, name: str | None = None) -> StepResult:
        """Run forward and backward of all micro-batches of a recorded step (default: the step of the plan).

        The new gradients are kept apart until `hand_over`.
        """
        return self.steps.train(name or self._inputs.step.name, request)

    def evaluate(self, request: StepRequest, name: str) -> StepResult:
        """Run the forward of all micro-batches of a recorded step, and no backward, whatever the request says."""
        return self.steps.evaluate(name, replace(request, train=False))

    def series(self, name: str) -> Series | None:
        """Begin a series of batches of a recorded step; None if they run one after the other. All stages must call it."""
        return self.steps.series(name)

    def from_first(self, value: Any) -> Any:
        """Return, on all stages of the replica, the plain value of the first stage, which reads the batch; all must call it."""
        return self.steps.share(value, self.plan.placement[0])

    def told_by_first(self, value: Any) -> Any:
        """Do what `from_first` does, but let the first stage go on before the others have the value."""
        return self.steps.tell(value, self.plan.placement[0])

    def from_last(self, value: Any) -> Any:
        """Return, on all stages of the replica, the plain value of the last stage; all must call it."""
        return self.steps.share(value, self.plan.placement[-1])

    def share_batch_statistics(self) -> None:
        """Let BatchNorm layers share their statistics over replicas in training steps. All ranks must call it together."""
        if self.groups is not None and self.groups.copies is not None and self.steps.statistics is None:
            with guarded(self.groups):
                self.steps.statistics = ReplicaStatistics(self.root, self.groups)
            released_with(self, release_groups, [self.steps.statistics.group])

    # ---- parameters and gradients

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this stage by full name."""
        return self.parameters.named()

    def hand_over(self, show_own: bool = False) -> None:
        """Add the gradients of the last step to `.grad`; see `StageParameters.hand_over`."""
        self.parameters.hand_over(show_own)

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip gradients of `parameters` by their norm over all stages; parameters of other stages are left out."""
        return self.parameters.clip_norm(parameters, max_norm)

    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients of the model. Every stage must call it."""
        return self.parameters.norm()

    # ---- the whole model

    @contextmanager
    def gathered(self, gradients: bool = False) -> Iterator[None]:
        """Hold all values (and gradients) on every rank inside; see `Parts.gathered`. All ranks must enter it together."""
        if gradients:
            self.parameters.show_gradients()
        try:
            with self.parts.gathered(gradients):
                yield
        finally:
            if gradients and not self.parameters.shows_gradients:
                self.parameters.hide_gradients()

    def full_state_dict(self) -> dict[str, Any]:
        """Return all parameters and buffers by full name on rank 0, and an empty dict elsewhere. All ranks must call it.

        Of replicas that make updates of their own it has the mean.
        """
        with self.parameters.mean_shown():
            return self.parts.full_state_dict()

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load the part of this stage from a state dict of the whole model."""
        self.parts.load_full_state_dict(state, strict)


def _close(transports: Sequence[Transport], groups: Sequence[dist.ProcessGroup]) -> None:
    """Close the sockets and groups of a runtime that is not used any more."""
    for transport in dict.fromkeys(transports):
        transport.close()
    release_groups(groups)
