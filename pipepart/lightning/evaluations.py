"""Batches of an evaluation that run in a series: those that Lightning is about to ask for run with the present one.

The pipeline stays full meanwhile. Results are kept until Lightning comes to their batch, so hooks, logs and metrics see the
batches one after the other, as ever. Code of the user that runs between two batches might change what the next one computes:
with such code each batch runs alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["Evaluations"]

_ONLY_LEAVE = {"log", "number", "outward", "append", "extend"}
"""Effects that no later batch can see, except by a value that guards the recording. So are all effects on metrics."""

Leaves = list[Any] | None


class Evaluations:
    """Results of batches of an evaluation that Lightning has not come to yet."""

    def __init__(self, job: Job, module: LightningModule) -> None:
        self._job, self._module = job, module
        self._results: dict[tuple[str, int | None, int], StepResult] = {}
        self._before: tuple[int | None, int] | None = None
        """The loader and the number of the batch before."""

    def run(
        self,
        name: str,
        loader: int | None,
        batch_idx: int,
        leaves: Leaves,
        request: Callable[[int, Leaves], StepRequest],
        flattener: Callable[[Any, int], Callable[[Recording], list[Any]]],
        effects: Effects,
        runtime: StageRuntime,
    ) -> StepResult:
        """Return the result of a recorded step on a batch; every rank must call it.

        `request` and `flattener` make the requests and the leaves of this batch and of later ones, by their number.
        """
        numbered = _gets_its_number(getattr(self._module, _step_of(name)))
        count = (
            runtime.in_series(name)
            if numbered and all(e.on_metric or e.kind in _ONLY_LEAVE for e in effects.all)
            else 1
        )
        if self._before != (loader, batch_idx - 1):  # another evaluation, which may have other weights
            self._results.clear()
        self._before = loader, batch_idx
        if batch_idx % count:
            found = self._results.pop((name, loader, batch_idx), None)
            return runtime.evaluate(request(batch_idx, leaves), name) if found is None else found
        self._results.clear()
        requests = [request(batch_idx, leaves)]
        if count > 1 and runtime.from_first(self._may_read_ahead(name)):
            trainer = self._module.trainer
            coming = batches_of_evaluation(trainer, count - 1, loader or 0)
            later = [flattener(prepare(trainer, batch) if runtime.is_first else None, index) for batch, index in coming]
            known = leaves_of_series(later, name, runtime)
            requests += [request(index, own) for own, (_, index) in zip(known, coming)]
        first, *others = runtime.evaluate_series(requests, name)
        for index, result in enumerate(others, batch_idx + 1):
            self._results[name, loader, index] = result
        return first

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
