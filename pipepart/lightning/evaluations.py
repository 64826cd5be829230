"""Batches of an evaluation that run in a series: those that Lightning is about to ask for run with the present one.

The pipeline stays full meanwhile. Results are kept until Lightning comes to their batch, so hooks, logs and metrics see the
batches one after the other, as ever. Code of the user that runs between two batches might change what the next one computes:
with such code each batch runs alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipepart.build import Job
from pipepart.build.step_variants import leaves_of_series
from pipepart.lightning.copied_ahead import shows_batch
from pipepart.lightning.data import batches_of_evaluation, needs_agreement, prepare, why_not_ahead
from pipepart.lightning.namespaces import overridden
from pipepart.lightning.noted_effects import Effects
from pipepart.recording import Recording
from pipepart.runtime import StageRuntime, StepRequest
from pipepart.runtime.program import StepResult
from pipepart.runtime.series import Series

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["Evaluation", "Evaluations"]

_ONLY_LEAVE = {"log", "number", "outward", "append", "extend"}
"""Effects that no later batch can see, except by a value that guards the recording. So are all effects on metrics."""

Leaves = list[Any] | None


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation calls: a recorded step on batches of one loader."""

    step: str
    loader: int | None
    request: Callable[[str, int, Leaves], StepRequest]
    """Returns the request for a batch, from the name of the recording, the number of the batch, and its leaves."""
    flattener: Callable[[Any, int], Callable[[Recording], list[Any]]]
    """Returns the function that gives the leaves of a batch, from the batch and its number."""
    made: Callable[[str, StepResult], Any]
    """Returns, on the last stage, the values of the effects of a step."""


class Evaluations:
    """The series of the present evaluation, in which batches run that Lightning has not come to yet."""

    def __init__(self, job: Job, module: LightningModule) -> None:
        self._job, self._module = job, module
        self._series: Series | None = None
        self._name = ""
        """The recording of the series."""
        self._next: tuple[str, int | None, int] | None = None
        """The step, the loader and the number of the batch that Lightning comes to next, if the evaluation goes on."""
        self._read = 0
        """The number of the next batch that has not run."""
        self._ended = False
        """Whether the series takes no more batches."""
        self._makes = False
        """Whether the last stage makes values of the results of a step."""

    @property
    def ahead(self) -> int:
        """The batches that stages run ahead of Lightning now; 0 with the last batch of an evaluation."""
        return self._series.ahead if self._series is not None and self._series.under_way else 0

    def go_on(self, evaluation: Evaluation, batch_idx: int, runtime: StageRuntime) -> tuple[str, StepResult] | None:
        """Return the recording and the result of a batch that runs in the present series; None if it does not.

        Every rank must call it when Lightning comes to a batch.
        """
        series = self._series
        if series is None:
            return None
        if self._next != (
            evaluation.step,
            evaluation.loader,
            batch_idx,
        ):  # another evaluation, maybe with other weights
            self._leave()
            return None
        if not series.under_way:
            self._leave()
            return None
        # Every batch looks at the state, which the effects of the batch before it may have changed.
        changed = runtime.recording(self._name).guards.changes(first=True) if runtime.is_first else []
        self._run(series, evaluation, batch_idx, [], runtime, "; ".join(map(str, changed)))
        if not series.under_way:
            self._leave()
            return None
        self._next = evaluation.step, evaluation.loader, batch_idx + 1
        return self._name, series.take()

    def begin(
        self, evaluation: Evaluation, name: str, batch_idx: int, leaves: Leaves, effects: Effects, runtime: StageRuntime
    ) -> StepResult:
        """Return the result of a batch, with which a series begins if there can be one; every rank must call it."""
        numbered = _gets_its_number(getattr(self._module, evaluation.step))
        alone = not numbered or not all(effect.on_metric or effect.kind in _ONLY_LEAVE for effect in effects.all)
        alone = alone or (effects.are_made and _may_end(effects, runtime.recording(name)))
        series = None if alone else runtime.series(name)
        if series is None or not runtime.from_first(self._may_read_ahead(name)):
            return runtime.evaluate(evaluation.request(name, batch_idx, leaves), name)
        self._series, self._name, self._ended, self._read = series, name, False, batch_idx
        self._makes = effects.are_made
        self._next = evaluation.step, evaluation.loader, batch_idx + 1
        self._run(series, evaluation, batch_idx, [leaves], runtime)
        return series.take()

    def _run(
        self,
        series: Series,
        evaluation: Evaluation,
        batch_idx: int,
        known: Sequence[Leaves],
        runtime: StageRuntime,
        changed: str = "",
    ) -> None:
        """Run batches until as many are under way as the series allows; `known`: the leaves of the present batch."""
        trainer, name = self._module.trainer, self._name
        count = 0 if self._ended else series.ahead + series.window - 1
        coming = [c for c in batches_of_evaluation(trainer, count, evaluation.loader or 0) if c[1] >= self._read]
        first = True
        while first or (not self._ended and coming and series.under_way <= series.ahead):
            group = coming[: series.window - len(known)] if series.under_way <= series.ahead else []
            later = [
                evaluation.flattener(prepare(trainer, batch) if runtime.is_first else None, index)
                for batch, index in group
            ]
            leaves = [*known, *leaves_of_series(later, runtime.recording(name), runtime)]
            requests = [self._request(evaluation, series, index, own) for index, own in enumerate(leaves, self._read)]
            ran = series.run(requests, changed)
            self._ended = self._ended or ran < len(requests)
            self._read += ran
            coming, known, first = coming[len(group) :], [], False

    def _request(self, evaluation: Evaluation, series: Series, index: int, leaves: Leaves) -> StepRequest:
        request = evaluation.request(self._name, index, leaves)
        return replace(request, made=partial(evaluation.made, self._name)) if series.makes and self._makes else request

    def _leave(self) -> None:
        if self._series is not None:
            self._series.leave()
        self._series = self._next = None

    def _may_read_ahead(self, name: str) -> bool:
        """Whether no code of the user runs between two batches, and no loader minds to be read ahead of the step."""
        trainer: Any = self._module.trainer
        hooks = [f"on_{name.partition('_')[0]}_batch_{when}" for when in ("start", "end")]
        if why_not_ahead(trainer, self._module) or any(
            overridden(hook, self._module, "LightningModule") for hook in hooks
        ):
            return False
        if any(shows_batch(callback, hooks) for callback in trainer.callbacks):
            return False
        loaders = trainer._active_loop._combined_loader.flattened
        return self._job.mesh.replicas == 1 or not any(map(needs_agreement, loaders))


def _step_of(name: str) -> str:
    """The method whose recording has this name."""
    return f"{name.partition('_')[0]}_step"


def _gets_its_number(step: Callable[..., Any]) -> bool:
    """Whether Lightning tells a step the number of its batch, by which its results are found again."""
    parameters = inspect.signature(step).parameters.values()
    return len(parameters) > 1 or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def _may_end(effects: Effects, recording: Recording) -> bool:
    """Whether effects of a batch may change the length of a container on which the recording of the next one depends."""
    grows = any(effect.kind in ("append", "extend") for effect in effects.all)
    return grows and recording.guards.on_contents
