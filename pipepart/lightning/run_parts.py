"""The parts of a strategy that belong to a run or to a process. Copies and pickles of a strategy make them anew."""

from __future__ import annotations

from typing import Any

from pipepart.errors import PlanError
from pipepart.lightning.as_written import AsWritten
from pipepart.lightning.checkpoints import Checkpoints
from pipepart.lightning.copied_ahead import BatchPlaces
from pipepart.lightning.loss_scaling import LossScaling
from pipepart.lightning.ranks import Ranks
from pipepart.lightning.recorded_steps import RecordedSteps
from pipepart.lightning.run_patches import RunPatches, Signals
from pipepart.lightning.step_clock import StepClock
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.lightning.wholeness import Wholeness
from pipepart.planning import Plan
from pipepart.runtime import StageRuntime

__all__ = ["RunParts"]


class RunParts:
    """The state of a strategy apart from what the user has configured."""

    _options: StrategyOptions
    _ranks: Ranks
    _whole: Wholeness
    _checkpoints: Checkpoints
    _batches: BatchPlaces
    _patches: RunPatches
    _steps: RecordedSteps | None
    _signals: Signals | None
    _scaling: LossScaling | None
    _plan: Plan | None
    _clock: StepClock | None
    """What the steps of a fit take under the trainer; None before a fit."""
    _opened: bool
    """Whether planning has opened the loader of a fit, which therefore starts again."""
    _late: bool
    """Whether the plan could not be made at set-up, so that it is made later."""
    _written: AsWritten
    """The steps of this run that are not recorded."""
    _large: bool
    _seed: int
    """The seed of rank 0 when the run was set up."""

    def _make_parts(self) -> None:
        """Make all parts as before the first run."""
        own: Any = self
        self._ranks = Ranks(self._options, lambda: own._processes, lambda: own.root_device)
        self._whole = Wholeness(self._ranks, lambda: own.after)
        self._checkpoints = Checkpoints(self._ranks, lambda: own.sharded)
        self._batches = BatchPlaces(lambda: own._module_and_trainer()[1], self._whole)
        self._patches = RunPatches()
        self._steps = self._signals = self._scaling = self._plan = self._clock = None
        self._opened = self._late = self._large = False
        self._written = AsWritten(False)
        self._seed = 0

    @property
    def runtime(self) -> StageRuntime:
        """The stage of this rank."""
        if self._whole.runtime is None:
            raise PlanError(
                "the pipeline is not set up yet: it is planned when the trainer starts, on its first batch. Call fit, "
                "validate, test or predict of the trainer first."
            )
        return self._whole.runtime

    @property
    def plans_training(self) -> bool:
        """Whether there is a plan that training follows. It may be made with the first batch, and steps may need none."""
        return self._whole.runtime is not None and self._whole.runtime.has("training_step")

    @property
    def plan(self) -> Plan:
        """The plan that the runtime executes, with the time of its rehearsal in `plan.rehearsed`."""
        plan = self.runtime.plan  # raises if the pipeline is not set up
        return plan if self._plan is None else self._plan

    def __getstate__(self) -> dict[str, Any]:
        """All that a copy keeps. As in strategies of Lightning, it makes its wrappers of optimizers anew."""
        state = {name: value for name, value in vars(self).items() if name not in _NAMES}
        if state.get("_launcher") is not None:  # its processes belong to this one
            state["_launcher"] = "made anew"
        return {**state, "_lightning_optimizers": []} if "_lightning_optimizers" in state else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_parts()
        own: Any = self
        if "_lightning_optimizers" in state:
            own.optimizers = own.optimizers
        if state.get("_launcher") is not None:
            own._configure_launcher()

    def __reduce__(self) -> Any:
        made: Any = super().__reduce__()
        make, arguments, _ = made
        return make, arguments, self.__getstate__()


_NAMES = frozenset({*RunParts.__annotations__, "_averages"}) - {"_options"}
