"""Steps of one stage: its recorded steps by name, training with accumulation and traces, and evaluation."""

from __future__ import annotations

import warnings
from typing import Any

from pipepart.runtime.chunked_step import ChunkedStep, StageInputs
from pipepart.runtime.failure import guarded
from pipepart.runtime.gradients import Accumulation
from pipepart.runtime.parameters import StageParameters
from pipepart.runtime.program import Program, StepRequest, StepResult
from pipepart.runtime.tracing import Trace, TraceBoard
from pipepart.runtime.transport import Transport, share
from pipepart.samples.window import BATCHES_OF_OTHER_FORMS, CountsAlike, Window

__all__ = ["Steps"]


class Steps:
    """Runs the recorded steps of one stage."""

    def __init__(
        self, inputs: StageInputs, transport: Transport | None, parameters: StageParameters, traces: TraceBoard
    ) -> None:
        self._inputs, self._transport, self._parameters, self._traces = inputs, transport, parameters, traces
        self.programs: dict[str, Program] = {}
        """The recorded steps by name."""
        self._accumulation = Accumulation()
        self._window: Window | None = None
        """The batches of the current optimizer step, on the first stage, if the loss needs their numbers together."""
        self._position = 0

    def add(self, name: str, step: ChunkedStep) -> None:
        """Make a step ready to run under this name."""
        self.programs[name] = Program(step, self._inputs, self._transport)

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
            mean = sync.mean if request.reduce else None
            result = program.run(request, batch, request.loss_scale * new, mean, trace)
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
            warnings.warn(BATCHES_OF_OTHER_FORMS, CountsAlike, stacklevel=4)
        return window

    def evaluate(self, name: str, request: StepRequest) -> StepResult:
        """Run the forward of all micro-batches."""
        program = self.programs[name]
        with guarded(self._inputs.groups):
            return program.run(request, program.prepare(request))

    def share(self, value: Any, source: int) -> Any:
        """Return the plain value of stage `source` on all stages of the replica. Every stage must call it."""
        groups = self._inputs.groups
        if groups is None or self._transport is None:
            return value
        with guarded(groups):
            return share(value, groups, self._transport, source, self._inputs.device)
