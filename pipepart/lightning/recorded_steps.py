"""Recorded steps of a module: makes their recordings, finds the one that holds for a batch, and runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipepart.build import Built, Example, Job, Recorded, Step, add_step, build, example_microbatch
from pipepart.build.job import no_samples
from pipepart.build.rehearsal import rehearsed
from pipepart.build.step_variants import Variants, empty_replica, leaves_ahead
from pipepart.build.verification import verification
from pipepart.errors import CaptureError
from pipepart.lightning.announce import tell
from pipepart.lightning.as_written import NotRecorded, not_recorded
from pipepart.lightning.data import batches_ahead, prepare, received, why_not_ahead
from pipepart.lightning.effects import record_with_effects
from pipepart.lightning.evaluations import Evaluation, Evaluations
from pipepart.lightning.late_plan import all_or_none
from pipepart.lightning.manual_run import ManualSteps
from pipepart.lightning.materialise import empty_names
from pipepart.lightning.noted_effects import Effects
from pipepart.lightning.repeat_effects import repeat_effects, values_made
from pipepart.lightning.skipped_steps import check_skipped_batch
from pipepart.lightning.step_numbers import all_numbers, numbers_of, step_numbers
from pipepart.lightning.step_updates import StepUpdates, taken_out
from pipepart.recording import Recording
from pipepart.recording.model_state.places import Place
from pipepart.runtime import StageRuntime, StepRequest
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object
from pipepart.runtime.microbatch import Whole
from pipepart.runtime.program import StepResult
from pipepart.samples.batch_numbers import NOT_KNOWN_AHEAD
from pipepart.samples.pieces import pieces_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["RecordedSteps"]

_WORTH_A_REHEARSAL = 50
"""Number of batches. Shorter runs are not rehearsed, since the rehearsal would take a large part of the run."""


class RecordedSteps:
    """The recordings of all steps of one module, with their effects. If `undivided`, other steps raise `NotRecorded`.

    `has_optimizers`: those of the run have been made already.
    """

    runtime: StageRuntime
    """The runtime of the recordings; set by `build`."""

    def __init__(
        self, job: Job, module: LightningModule, undivided: bool = False, has_optimizers: bool = False
    ) -> None:
        self._has_optimizers = has_optimizers
        self._job, self._module, self._undivided = job, module, undivided
        self._trainable: tuple[bool, ...] = ()
        """For each parameter, whether it was trained when the training step was recorded last."""
        self.effects: dict[str, Effects] = {}
        """The effects of each recording, by its name."""
        self.variants: dict[str, Variants] = {}
        """The recordings of each step."""
        self.empty = bool(empty_names(module))
        """Whether the model was built on the meta device, so that no rank has ever held all of it."""
        self._manual: ManualSteps | None = None
        """The segments of training steps with manual optimization."""
        self._updates = StepUpdates()
        self._evaluations = Evaluations(job, module)
        self._continues = False
        """Whether gradients of earlier batches are kept for the next batch, to make one step of the optimizer."""
        self._seconds: list[float] = []

    def build(self, step: str, batch: Any, loader: int | None = None) -> Built:
        """Record the first step on a batch, agree on a plan, and keep this rank's stage. Every rank must call it.

        The modes of the modules are those that the step will have. All ranks raise `NotYet` if the step raises an error of its
        own. `loader` is the number of the loader of the batch, if the step gets it.
        """
        trains = step == "training_step"
        self._optimize_manually(step)
        first = Step(
            step,
            lambda example: self._record(step, step, example, loader),
            trains,
            segments=self._segments(step, step),
            around=lambda: all_or_none(self._job.groups),
        )
        with _something_trained(self._module) if trains else nullcontext():
            built = build(self._job, first, batch)
        self.runtime = built.runtime
        self.effects[step] = replace(self.effects[step], checked=built.samples.checked)
        key = _key(step, loader)
        self.variants[key] = Variants(key, [step], 1)
        if first.segments is not None and self._manual is not None:
            self._manual.check(step, built.runtime)
        return built

    def _optimize_manually(self, step: str) -> None:
        if step == "training_step" and not self._module.automatic_optimization and self._manual is None:
            self._manual = ManualSteps(self._job, self._module, self._has_optimizers)

    def _segments(self, step: str, name: str) -> Callable[[], Sequence[Step]] | None:
        """The segments of a recording of a step, once it is recorded; None for steps that are run as they are."""
        manual = self._manual
        if manual is None or step != "training_step":
            return None
        return lambda: manual.steps(name, self.effects)

    def describe(self, step: str, built: Built) -> str:
        """Notes on the recording and on its samples, and the verification if the option `verify` is set, as lines."""
        trainer, weighed, effects = self._module.trainer, self.runtime.weighed(step), self.effects[step]
        notes = built.notes
        if self._manual is not None and step == "training_step":
            notes += (self._manual.describe(step),)
        if trainer.accumulate_grad_batches > 1:
            notes += weighed.notes
            hook = why_not_ahead(trainer, self._module) if weighed.needs_window else ""
            notes += (f"{NOT_KNOWN_AHEAD} ({hook} prevents reading them in advance)",) if hook else ()
        text = "".join(f"\nnote       {note}" for note in notes) + built.samples.lines
        if built.reference is not None:
            names = {built.recorded.recording.loss_index or 0: "loss", **effects.logged}
            text += "\n" + verification(self.runtime, built.reference, names, effects.separate, self._job.context)
        return text

    # ---- steps

    def start(self, seconds: list[float], seed: int) -> None:
        """Start a run. The time of each training step, without the optimizer, is appended to `seconds`."""
        self._seconds, self._continues = seconds, False
        self.runtime.seeds.seed = seed

    def train(self, batch: Any, batch_idx: int, loss_scale: float) -> Any:
        """Forward and backward of all micro-batches, and the effects of the step. Returns its result."""
        trainer, runtime = self._module.trainer, self.runtime
        name, leaves = self._find("training_step", batch, batch_idx, None)
        if self._manual is not None:
            return self._act(self._manual, name, leaves)
        # Replicas exchange gradients once for each step of the optimizer; until then each keeps its own.
        accumulates, forward = trainer.fit_loop._should_accumulate(), trainer.fit_loop._skip_backward
        if runtime.recording(name).loss_index is None:  # the step returns None for this batch, which is skipped
            with guarded(self._job.groups):
                check_skipped_batch(type(self._module).__name__, self._job.mesh)
            self._continues = self._continues and accumulates
            number = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            request = self._request(name, leaves, runtime.seeds.of_step("training_step", number))
            return self._forward(name, request, batch_idx, None)
        ahead = [] if self._continues or forward else self._leaves_ahead(name, batch_idx)
        started = time.perf_counter()
        request = StepRequest(
            leaves=leaves,
            draw_key=runtime.seeds.of_step("training_step", trainer.fit_loop.epoch_loop.batch_progress.total.ready),
            reduce=not accumulates or not runtime.parameters.combines,
            continues=self._continues,
            ahead=ahead,
            loss_scale=loss_scale / trainer.accumulate_grad_batches,
            trace=runtime.tracing.due(len(self._seconds)),
            outputs_everywhere=True,
            separate=self.effects[name].separate,
            context=self._job.context,
        )
        numbers = partial(all_numbers, runtime.recording(name), trainer, batch_idx, None)
        self._updates.run(name, True, numbers, runtime)
        result = runtime.train(request, name)
        self._updates.run(name, False, numbers, runtime)
        self._continues = accumulates and not forward
        if forward:  # a callback wants the batch statistics of the step only
            runtime.parameters.take_gradients()
        self._seconds.append(time.perf_counter() - started)
        return repeat_effects(self.effects[name], result, runtime.recording(name), self._module, runtime)

    def _act(self, manual: ManualSteps, name: str, leaves: list[Any] | None) -> Any:
        """Run a step with manual optimization: its segments, and its acts between them."""
        trainer, runtime, effects = self._module.trainer, self.runtime, self.effects[name]
        key = runtime.seeds.of_step("training_step", trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        result = manual.train(name, runtime, leaves, key, effects)
        self._seconds.append(manual.seconds)
        return repeat_effects(effects, result, runtime.recording(name), self._module, runtime)["result"]

    def evaluate(self, step: str, batch: Any, batch_idx: int, loader: int | None) -> Any:
        """Forward of all micro-batches, and the effects of the step. Returns its result."""
        trained = self._module.trainer.fit_loop.epoch_loop.batch_progress.total.ready

        def request(name: str, index: int, own: list[Any] | None) -> StepRequest:
            return self._request(name, own, self.runtime.seeds.of_step(step, trained, loader or 0, index))

        flattener, runtime = partial(self._flatten, loader=loader), self.runtime
        evaluation = Evaluation(step, loader, request, flattener, self._made)
        found = self._evaluations.go_on(evaluation, batch_idx, runtime)
        if found is None:
            name, leaves = self._find(step, batch, batch_idx, loader)
            if self._updates.of(name):
                return self._forward(name, request(name, batch_idx, leaves), batch_idx, loader)
            result = self._evaluations.begin(evaluation, name, batch_idx, leaves, self.effects[name], runtime)
        else:
            name, result = found
        return repeat_effects(self.effects[name], result, runtime.recording(name), self._module, runtime)

    @property
    def ahead(self) -> int:
        """The batches of an evaluation that stages run ahead of Lightning."""
        return self._evaluations.ahead

    def _made(self, name: str, result: StepResult) -> Any:
        return values_made(self.effects[name], self._module, result)

    def _request(self, name: str, leaves: list[Any] | None, draw_key: int | None = None) -> StepRequest:
        return StepRequest(
            leaves=leaves, outputs_everywhere=True, separate=self.effects[name].separate, context=self._job.context,
            draw_key=draw_key,
        )  # fmt: skip

    def _forward(self, name: str, request: StepRequest, batch_idx: int, loader: int | None) -> Any:
        """Run the forward of a recorded step, and its effects."""
        runtime = self.runtime
        numbers = partial(all_numbers, runtime.recording(name), self._module.trainer, batch_idx, loader)
        self._updates.run(name, True, numbers, runtime)
        result = runtime.evaluate(request, name)
        self._updates.run(name, False, numbers, runtime)
        return repeat_effects(self.effects[name], result, runtime.recording(name), self._module, runtime)

    def _find(self, step: str, batch: Any, batch_idx: int, loader: int | None) -> tuple[str, list[Any] | None]:
        """The name of a recording that holds for this batch, and the leaves of the batch on the first stage.

        If there is none, the step is recorded again. Every rank must call it.
        """
        key = _key(step, loader)
        variants = self.variants.setdefault(key, Variants(key))
        if step == "training_step" and _trainable(self._module) != self._trainable:
            variants.names = []  # a part was frozen or unfrozen (fine-tuning callbacks)
        known = variants.names[0] if variants.names else next(iter(self.effects))
        # Replicas agree only on steps that reduce gradients: their windows may have different numbers of batches.
        together = step == "training_step" and not self._module.trainer.fit_loop._should_accumulate()
        empty = empty_replica(batch, known, self.runtime, all_replicas=together)
        for _ in range(2):
            if variants.names:
                name, leaves = variants.choose(self._flatten(batch, batch_idx, loader), self.runtime, empty=empty)
                if name is not None:
                    return name, leaves
            elif replica := self.runtime.from_first(empty):
                raise no_samples(step, self._job.groups, replica)
            with not_recorded(self._undivided):
                self._add(variants, step, batch, batch_idx, loader)
        refusal = CaptureError(
            f"{step}: the recording that was made on this batch does not hold for this batch. Expected a step that reads the "
            "same values in each call on one batch. Move values that change with each call (counters) to a hook."
        )
        raise NotRecorded(refusal) if self._undivided else refusal

    def _leaves_ahead(self, name: str, batch_idx: int) -> list[list[Any] | None]:
        """On the first stage, the leaves of the batches that are accumulated with this one, if their numbers are needed.

        Every rank must call it: all take the same number of batches from their loaders.
        """
        trainer, runtime = self._module.trainer, self.runtime
        if trainer.accumulate_grad_batches == 1 or not runtime.weighed(name).needs_window:
            return []
        if why_not_ahead(trainer, self._module):
            return []
        coming, recording = batches_ahead(trainer), runtime.recording(name)
        if not runtime.is_first:
            return []
        return [
            leaves_ahead(self._flatten(prepare(trainer, batch), index, None), recording, runtime.plan.microbatches)
            for index, batch in enumerate(coming, batch_idx + 1)
        ]

    def rehearse(self, example: Any, ahead: float) -> float | None:
        """The measured time of a training step on the example.

        None if there are few batches `ahead`, if the model has no values, if replicas borrow its values from each other, or if
        the whole batch needs another recording.
        """
        if self.empty or ahead < _WORTH_A_REHEARSAL or self._manual is not None:
            return None
        if self.runtime.parameters.borrowed is not None:  # its memory comes and goes, so that it cannot be restored
            return None
        name, leaves = self.variants["training_step"].choose(self._flatten(example, 0, None), self.runtime)
        if name is None or self.runtime.recording(name).loss_index is None:
            return None  # it is recorded when the batch is trained on, or the step skips this batch
        return rehearsed(self.runtime, self._request(name, leaves), name)

    def _record(
        self,
        name: str,
        step: str,
        example: Example,
        loader: int | None = None,
        batch_idx: int = 0,
        numbers: Sequence[Place] = (),
    ) -> Recorded:
        training = step == "training_step"
        with self._job.context(), torch.set_grad_enabled(training):
            recording, effects, notes = record_with_effects(
                self._module, step, example.batch, batch_idx=batch_idx, dataloader_idx=loader, numbers=numbers,
                batching=example.batching, others=example.others,
                outline=self._manual.outline if self._manual is not None else None,
            )  # fmt: skip
        self.effects[name] = effects
        numbered = step_numbers(self._module.trainer, batch_idx, loader)
        if notes is not None and self._manual is not None:
            self._manual.cut(name, recording, notes, example.batch, numbered)
        if notes is None:
            options = self._job.options
            count = 1 if options.loss == "microbatch" else options.microbatches
            recording, update = taken_out(recording, count, self.empty)
            self._updates.add(name, update)
        if training:
            self._trainable = _trainable(self._module)
        given = numbers_of(recording, self._module.trainer, numbered)
        return Recorded(recording, effects.reduced_otherwise, effects.averaged, given)

    def _add(self, variants: Variants, step: str, batch: Any, batch_idx: int, loader: int | None) -> None:
        """Record a step when it is first needed, or once more, on the batch of the first stage of this replica."""
        name, runtime, groups = variants.new_name(), self.runtime, self._job.groups
        self._optimize_manually(step)
        if groups is not None:
            with guarded(groups):
                source = groups.rank_of_stage(runtime.plan.placement[0])
                batch = broadcast_object(batch, source, groups, inside_replica=True)
            if groups.rank != source:
                batch = received(self._module.trainer, batch)
        options = replace(self._job.options, plan=None, microbatches=runtime.plan.microbatches)
        part = example_microbatch(batch, options, self._job.mesh, self._module, fewer=True)

        def record(example: Example) -> Recorded:
            made: list[Recorded] = []

            def make(numbers: Sequence[Place]) -> Recording:
                made.append(self._record(name, step, example, loader, batch_idx, numbers))
                return made[-1].recording

            variants.record(make, runtime)
            return made[-1]

        # Tensors without values are recorded by their shapes.
        with runtime.parts.by_shapes() if self.empty else runtime.parts.gathered():
            if not self.empty:
                runtime.steps.kept.share()
            leaves = self._flatten(part.batch, batch_idx, loader)
            added = Step(name, record, step == "training_step", segments=self._segments(step, name))
            _, samples = add_step(self._job, runtime, added, batch, part, leaves)
        if added.segments is not None and self._manual is not None:
            self._manual.check(name, runtime)
        self.effects[name] = replace(self.effects[name], checked=samples.checked)
        if samples.text:
            tell(f"pipepart: {type(self._module).__name__}.{name}{samples.lines}\n")
        for dropped in variants.added(name, runtime):
            del self.effects[dropped]
            if added.segments is not None and self._manual is not None:
                self._manual.drop(dropped, runtime)

    def _flatten(self, batch: Any, batch_idx: int, loader: int | None) -> Callable[[Recording], list[Any]]:
        """A function that returns the leaves of a batch and the numbers of its step, as a recording takes them."""
        runtime, trainer = self.runtime, self._module.trainer
        numbers = step_numbers(trainer, batch_idx, loader)

        def flatten(recording: Recording) -> list[Any]:
            own = numbers_of(recording, trainer, numbers)
            leaves = recording.flatten((batch,), own)
            pieces = pieces_of(batch, runtime.root, runtime.options.batch_dim, False, runtime.plan.microbatches)
            if pieces is None:
                return leaves
            return Whole(leaves, pieces, batch, lambda part: recording.flatten((part,), own))

        return flatten


def _key(step: str, loader: int | None) -> str:
    """The name of the recordings of a step: one for each loader, if the step gets its number."""
    return step if loader is None else f"{step}:{loader}"


@contextmanager
def _something_trained(module: LightningModule) -> Iterator[None]:
    """Inside, all parameters are trained if the user has frozen all of them: a callback may thaw some when the fit starts.

    The plan is made for that, and the first step is recorded again.
    """
    frozen = list(module.parameters())
    if any(parameter.requires_grad for parameter in frozen):
        frozen = []
    changed = [parameter for parameter in frozen if parameter.is_floating_point() or parameter.is_complex()]
    for parameter in changed:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(False)


def _trainable(module: LightningModule) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in module.parameters())
