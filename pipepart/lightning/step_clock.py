"""The clock of the steps under a Trainer: what each step of a fit took, and for what. It listens to the profiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipepart.lightning.run_patches import RunPatches
from pipepart.planning import Plan
from pipepart.report.account import Account, MeanStep, account_of
from pipepart.report.figures import WARM_UP
from pipepart.runtime import StageRuntime

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["StepClock"]

_MOST = 10_000
"""Steps that are kept: the last ones."""


class StepClock:
    """Listens to the actions that Lightning announces to its profiler, whichever profiler the user has chosen.

    A step lasts from the request for a batch to the request for the next one, so validation, checkpoints and the end of an
    epoch make single steps long. The mean is therefore of the steps in the middle half.
    """

    def __init__(self, trainer: Trainer, patches: RunPatches, step_times: Sequence[float]) -> None:
        """`step_times`: the list to which the strategy appends the seconds of each pipelined step."""
        self._pipeline = step_times
        self._begun: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._rows: list[tuple[float, float, float, float, int]] = []
        """For each step: whole, pipeline, optimizer, input, and the number of pipelined steps before it."""
        self._at: float | None = None
        self._before = 0
        profiler = trainer.profiler  # type: ignore[attr-defined]
        for name, note in (("start", self._start), ("stop", self._stop)):
            patches.put(profiler, name, _after(getattr(profiler, name), note))

    def _start(self, action: str) -> None:
        kind = _kind_of(action)
        if kind is None:
            return
        now = time.perf_counter()
        if kind == "next":
            self._end(now)
            self._at = now
        self._begun[kind] = now

    def _stop(self, action: str) -> None:
        kind = _kind_of(action)
        if kind is not None and kind in self._begun:
            self._spent[kind] = self._spent.get(kind, 0.0) + time.perf_counter() - self._begun.pop(kind)

    def _end(self, now: float) -> None:
        """End the current step, which is kept if it has run one step of the pipeline."""
        spent, self._spent = self._spent, {}
        before, self._before = self._before, len(self._pipeline)
        if self._at is None or len(self._pipeline) != before + 1:
            return
        update = max(0.0, spent.get("update", 0.0) - spent.get("step", 0.0)) if "update" in spent else 0.0
        fetched = spent.get("next", 0.0) + spent.get("move", 0.0)
        self._rows.append((now - self._at, self._pipeline[before], update, fetched, before))
        del self._rows[:-_MOST]

    def mean(self, traced: int | None) -> MeanStep | None:
        """Return the mean of the usual steps. `traced` is the number of the step whose timeline was recorded.

        The last step is not among them: after it comes the end of the training, and no request for a batch.
        """
        rows = [row for row in self._rows if row[-1] >= WARM_UP] or self._rows
        if not rows:
            return None
        rows = sorted(rows)[len(rows) // 4 : len(rows) - len(rows) // 4]
        whole, pipeline, update, fetched = (statistics.fmean(column) for column in list(zip(*rows))[:4])
        known = traced is not None and traced < len(self._pipeline)
        own = self._pipeline[traced] if known and traced is not None else None
        return MeanStep(len(rows), whole, pipeline, update, fetched, own)

    def account(self, plan: Plan, runtime: StageRuntime) -> Account | None:
        """Return the account of a step. None: no step was traced, or none was optimized by the trainer."""
        mean, timeline = self.mean(runtime.tracing.last), runtime.timeline
        return None if mean is None or timeline is None else account_of(plan, timeline, mean)


def _after(original: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    def both(action_name: str, *args: Any, **kwargs: Any) -> Any:
        answer = original(action_name, *args, **kwargs)
        note(action_name)
        return answer

    return both


def _kind_of(action: str) -> str | None:
    """Return what an action of the training loop is; None: of no interest here."""
    if action.endswith("].train_dataloader_next"):
        return "next"
    if action.startswith("[LightningModule]") and action.endswith(".optimizer_step"):
        return "update"
    if action.startswith("[Strategy]"):
        return {"training_step": "step", "batch_to_device": "move"}.get(action.rsplit(".", 1)[-1])
    return None
