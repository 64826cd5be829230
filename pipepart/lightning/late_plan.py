"""Plans that are made later than at set-up, since a step needs what hooks set when a run starts.

In a run of one process with nothing to divide, all plans are made with the first batch (`as_written`).

Set-up comes before `on_fit_start` and `on_train_start`. If a training step raises an error of its own when it is recorded there
(an attribute that does not exist yet, an assertion), it is recorded once more after `on_fit_start`, and at last with the first
batch, where the same error would be raised on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipepart.errors import PipelineError, PipepartError, PlanError
from pipepart.lightning.announce import tell
from pipepart.lightning.as_written import AsWritten, NotRecorded, NotYet, not_recorded
from pipepart.lightning.data import loader_number, of_rank_zero, shared_example
from pipepart.lightning.materialise import empty_names
from pipepart.lightning.random_states import isolate_rng
from pipepart.lightning.run_patches import RunPatches
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.lightning.wholeness import Wholeness, move_to_device
from pipepart.recording.inputs import trees
from pipepart.runtime import Groups
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import gather_objects

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from pipepart.lightning.ranks import Ranks
    from pipepart.lightning.recorded_steps import RecordedSteps

__all__ = ["LatePlans", "all_or_none"]


@contextmanager
def all_or_none(groups: Groups | None) -> Iterator[None]:
    """Around the recording of a step: if code of the user raises an error on a rank, all ranks raise `NotYet`."""
    error: Exception | None = None
    try:
        yield
    except PipepartError:
        raise
    except Exception as raised:
        error = raised
    mine = "" if error is None else f"{type(error).__name__}: {error}"
    found = [mine] if groups is None else gather_objects(mine, groups)
    failed = next((rank for rank, text in enumerate(found) if text), None)
    if failed is not None:
        raise NotYet(error or PipelineError(f"the step has failed on rank {failed}: {found[failed]}")) from error


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """Inside, the modules have the modes of an evaluation, which Lightning sets when the loop starts."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _of_no_mode(batch: Any) -> Any:
    """A batch that was read in the inference mode, as one that was not."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in trees.leaves_of(batch)):
        return batch
    return trees.map_structure(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


class LatePlans:
    """The part of a strategy that makes its plan: at set-up, before the loops run, or with the first batch."""

    _steps: RecordedSteps | None
    _whole: Wholeness
    _ranks: Ranks
    _patches: RunPatches
    _options: StrategyOptions
    _opened: bool
    _late: bool
    _large: bool
    _seed: int
    _written: AsWritten
    step_times: list[float]

    if TYPE_CHECKING:

        @property
        def root_device(self) -> torch.device: ...

        def broadcast(self, obj: Any, src: int = 0) -> Any: ...

        def _module_and_trainer(self) -> tuple[LightningModule, Trainer]: ...

        def _build(
            self, trainer: Trainer, module: LightningModule, step: str, example: Any, loader: int | None
        ) -> None: ...

        @property
        def plans_training(self) -> bool: ...

        def _follow_hooks(self, trainer: Trainer, module: LightningModule) -> None: ...

        def _connect_late_plan(self) -> None: ...

    @property
    def _recorded(self) -> RecordedSteps:
        assert self._steps is not None
        return self._steps

    def _plan_at_set_up(self, trainer: Trainer, step: str) -> None:
        with isolate_rng():  # random numbers that planning draws do not change those of the run
            example = shared_example(trainer, self._options.example_batch, self.broadcast, self._patches)
            if example is not None:
                opened = self._options.example_batch is None
                self._opened = opened and trainer.state.fn == "fit"
                self._plan_or_wait(step, example, loader_number(trainer, opened, self._patches))

    def _plan_or_wait(self, step: str, example: Any, loader: int | None) -> None:
        """Plan at set-up. If the step is not ready for that, a plan is made before the loops run, or with a batch."""
        module, trainer = self._module_and_trainer()
        try:
            with _evaluated(module) if step != "training_step" else nullcontext():
                self._build(trainer, module, step, example, loader)
        except NotYet as later:
            if self._large or empty_names(module):  # no rank can hold the whole module until then
                raise later.error from None
            self._steps, self._late = None, True
            if step == "training_step":
                self._before_the_loops(trainer, example)

    def _before_the_loops(self, trainer: Trainer, example: Any) -> None:
        """Plan after `on_fit_start`, and before anything runs. If that is too early, the first batch is left to do it."""
        run: Any = trainer._run_stage

        def run_stage() -> Any:
            try:
                self._plan_now("training_step", example, None)
            except NotYet as later:
                name = type(trainer.lightning_module).__name__
                tell(
                    f"pipepart: {name}.training_step raises {type(later.error).__name__} before training has started, so the "
                    "pipeline is planned with the first batch\n"
                )
            return run()

        self._patches.put(trainer, "_run_stage", run_stage)

    def _plan_now(self, step: str, batch: Any, loader: int | None) -> None:
        module, trainer = self._module_and_trainer()
        try:
            with guarded(self._ranks.groups), isolate_rng():
                with (
                    torch.inference_mode(False),
                    torch.enable_grad(),
                ):  # as at set-up; an evaluation runs in other modes
                    self._build(trainer, module, step, _of_no_mode(batch), loader)
                self._connect_late_plan()
                self._recorded.start(self.step_times, self._seed)
                self._follow_hooks(trainer, module)
        except NotYet:
            self._steps = None
            raise

    def _planned_with(self, step: str, batch: Any, loader: int | None = None) -> RecordedSteps:
        """The recorded steps. A run that was set up without a plan is planned with this batch.

        If steps of an evaluation came first, the plan was made for them; it is made anew for training.
        """
        module, trainer = self._module_and_trainer()
        missing = self._steps is not None and step == "training_step" and step not in self._steps.variants
        if missing and not self._late:
            raise PlanError(
                "there was no training batch when the run was set up, so the pipeline was planned with an evaluation step. "
                "Give the strategy `example_batch`, a batch of the training data."
            )
        if missing:
            self._steps = None
            self._whole.make_whole()
            move_to_device(module, self.root_device)
        if self._steps is None:
            with guarded(self._ranks.groups):
                batch = of_rank_zero(trainer, batch, self.broadcast)
            try:
                with not_recorded(self._written.possible):
                    self._plan_now(step, batch, loader)
            except NotYet as later:
                raise later.error from None
        return self._recorded

    def _recorded_or(
        self, step: str, recorded: Callable[..., Any], written: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        """Run a step from its recording; or as it is written, if it cannot be recorded and nothing has to be divided."""
        module, trainer = self._module_and_trainer()
        # The plan of a fit is that of its training: without it, evaluations (the sanity check) have nothing to follow.
        unplanned = trainer.state.fn == "fit" and step != "training_step" and not self.plans_training
        if step not in self._written.steps and not (self._written.possible and unplanned):
            try:
                return recorded(*args)
            except NotRecorded as refused:
                if self._whole.runtime is None:
                    self._steps = None
                if step == "training_step" and trainer.accumulate_grad_batches > 1 and self.step_times:
                    raise refused.error from None  # the gradients of one step of the optimizer would have different weights
                self._written.add(module, step, refused.error, self.plans_training)
        return written(*args)
