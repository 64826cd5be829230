"""A series: batches of an evaluation that go through the pipeline one after the other, without a pause between them.

The first stage sends one message in front of the micro-batches of each window: the forms and the numbers of its batches. The
other stages follow, and never wait for a stage behind them. The last stage posts the results. Each stage takes those of a
batch after it has run `ahead` more, which bounds the memory of what is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pipepart.errors import PipelineError
from pipepart.runtime.executor import PreparedBatch
from pipepart.runtime.failure import guarded
from pipepart.runtime.mesh import Groups
from pipepart.runtime.microbatch import MicrobatchSizes
from pipepart.runtime.program import Program, StepRequest, StepResult, prepared
from pipepart.runtime.results import Results
from pipepart.runtime.transport import Posts, Transport, received

__all__ = ["Series"]


@dataclass(frozen=True)
class _Run:
    """A batch that has run on this stage."""

    sizes: MicrobatchSizes
    samples: int
    number: int | None
    """The number of its result on the lane; None if stages meet after each window."""
    result: StepResult | None
    """None until it is received."""


class Series:
    """The batches of one evaluation with one recorded step. All stages of the replica make the same calls."""

    def __init__(
        self,
        program: Program,
        groups: Groups,
        control: Transport,
        headers: Posts,
        results: Results,
        first: int,
        versions: Callable[[], Any],
    ) -> None:
        """`headers` go from stage `first` to the others by `control`. `results` has a lane if batches run ahead.

        `versions` returns what changes with the parameters of this stage.
        """
        self.window, self.ahead = program.pace.window, program.pace.ahead
        """The batches that are given to `run` together; the batches that run before the results of a batch are taken."""
        self._program, self._groups, self._control, self._results = program, groups, control, results
        self._headers, self._first, self._versions = headers, first, versions
        self._most = 2 * (self.ahead + self.window)
        """The headers or results that are under way at most; so many are never needed."""
        self._under_way: deque[_Run] = deque()
        self._made = False
        """Whether something was made of results, in their order, that cannot be taken back."""

    @property
    def under_way(self) -> int:
        """The number of batches that have run and whose results were not taken."""
        return len(self._under_way)

    @property
    def makes(self) -> bool:
        """Whether `StepRequest.made` is called."""
        return self.ahead > 0

    def run(self, requests: Sequence[StepRequest], changed: str = "") -> int:
        """Run the next batches on this stage, and return how many of them have run.

        On the first stage, a request without leaves ends the series: the recording does not hold for its batch. `changed`, on
        the first stage: the state on which the batches under way depend has changed as the text says, so they count for
        nothing.
        """
        with guarded(self._groups):
            header: Any = None
            parts: list[Any] = [None] * len(requests)
            if self._groups.stage == self._first:
                fitting = takewhile(lambda request: request.leaves is not None, requests if not changed else ())
                split = [self._program.split(request) for request in fitting]
                header, parts = (changed, [one for one, _ in split]), [part for _, part in split]
                others = [stage for stage in range(self._groups.mesh.stages) if stage != self._first]
                self._headers.send(header, others, self._most)
            else:
                header = received(self._groups, self._control, self._first)
            changed, forms = header
            if changed:
                self._forget(changed)
            elif forms:
                batches = [prepared(form, part) for form, part in zip(forms, parts)]
                self._forward(requests[: len(forms)], batches)
            return len(forms)

    def _forward(self, requests: Sequence[StepRequest], batches: Sequence[PreparedBatch]) -> None:
        self._made = self._made or any(request.made is not None for request in requests)
        for request, batch, merged in zip(requests, batches, self._program.forward(requests, batches)):
            sizes, samples = batch.sizes, batch.samples
            number: int | None = None
            result: StepResult | None = None
            if not self.ahead:
                result = self._result(self._results.meet(merged, request.outputs_everywhere), sizes, samples)
            elif merged is None:
                number = self._results.expect()
            else:
                made = request.made(self._result(merged, sizes, samples)) if request.made is not None else None
                number = self._results.post(merged, made, self._most)
                result = self._result(merged, sizes, samples, made)
            self._under_way.append(_Run(sizes, samples, number, result))

    def _result(self, outputs: list[Any], sizes: MicrobatchSizes, samples: int, made: Any = None) -> StepResult:
        return StepResult(outputs, sizes, self._program.laws, samples, made)

    def results(self, feed: Callable[[], int]) -> Iterator[StepResult]:
        """Yield the results of all batches, in order. `feed` calls `run` with the next window, and returns its answer."""
        ended, before = False, self._versions()
        try:
            while not ended or self._under_way:
                while not ended and len(self._under_way) <= self.ahead:
                    ended = feed() < self.window
                if self._under_way:
                    yield self.take()
                    self._check(before)
        finally:
            self.leave()

    def _check(self, before: Any) -> None:
        """Refuse to go on if code between two batches has changed parameters with which the next ones have run already."""
        if self._under_way and self._versions() != before:
            with guarded(self._groups):
                raise PipelineError(
                    f"parameters have changed while {self.under_way} batches of `evaluations` were under way, which have run "
                    "with those before.\n"
                    "  do: change parameters after the loop, or call `evaluate` for each batch"
                )

    def take(self) -> StepResult:
        """Return the result of the batch that has run longest ago. Tensors are on all stages."""
        run = self._under_way.popleft()
        result = run.result
        with guarded(self._groups):
            if result is None:
                assert run.number is not None
                outputs, made = self._results.take(run.number)
                result = self._result(outputs, run.sizes, run.samples, made)
            elif run.number is not None and not self._under_way:
                self._results.arrived(run.number)
            if not self._under_way:
                self._headers.finish()
        return result

    def leave(self) -> None:
        """Forget the results that were not taken."""
        for run in self._under_way:
            if run.result is None and run.number is not None:
                self._results.drop(run.number)
        self._under_way.clear()

    def _forget(self, changed: str) -> None:
        """Forget the batches under way, whose state has changed since they ran."""
        if self._made and self._under_way:
            raise PipelineError(
                f"the state that the step reads has changed between two batches of an evaluation: {changed}. Metrics have seen "
                "later batches already.\n"
                "  do: change it before the evaluation, or in a hook of the module between two batches "
                "(on_validation_batch_end), with which batches run one after the other"
            )
        self.leave()
