"""The path from a model and an example batch to a running stage, for `Pipeline` and the Lightning strategy.

    record all steps on every rank -> check samples -> agree on a plan -> prove its chunks -> make the runtime

`pipepart plan`, which starts no processes, uses only the first part of this path (`record_example`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pipepart.build.agreement import agree_on_plan, prove_step
from pipepart.build.batch_verdict import Samples, agree_on_samples, together
from pipepart.build.foreign_collectives import collectives_refused
from pipepart.build.job import Example, Job, Recorded, Step, example_microbatch
from pipepart.build.verification import Reference, reference_of
from pipepart.planning.sync_choice import chosen_sync
from pipepart.recording import Recording
from pipepart.runtime import RecordedStep, StageInputs, StageRuntime
from pipepart.runtime.failure import guarded

__all__ = ["Built", "add_step", "build", "record_example"]


@dataclass(frozen=True)
class Built:
    """The result of set-up: a stage that is ready to run, and the findings of set-up."""

    runtime: StageRuntime
    recorded: Recorded
    samples: Samples
    """The verdict on ops of the first step that combine samples."""
    example: Example
    reference: Reference | None
    """The results of one process on the example, with the option `verify`."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the recording and of its costs."""
        costs = self.runtime.costs
        return (*self.recorded.recording.notes, *(costs.notes if costs is not None else ()))


def record_example(job: Job, step: Step, batch: Any) -> tuple[Example, Recorded]:
    """Return the first micro-batch of a batch, and the step recorded on it. Every rank must call it."""
    example = example_microbatch(batch, job.options, job.mesh, job.root, job.call)
    return example, _recorded(job, step, example)


def _recorded(job: Job, step: Step, example: Example) -> Recorded:
    step.mode()
    with guarded(job.groups), step.around(), collectives_refused(job.root):
        return step.record(example)


def build(job: Job, step: Step, batch: Any, further: Sequence[Step] = ()) -> Built:
    """Record a step, plan it, and make the runtime of the stage of this rank. Every rank must call it with the same batch.

    The plan is made for `step` and applied to the `further` steps, which are recorded while the model is still whole.
    """
    with _modes_kept(job.root):
        example, recorded = record_example(job, step, batch)
        segments = () if step.segments is None else tuple(step.segments())
        further = (*segments, *further)
        others = [_recorded(job, other, example) for other in further]
        step.mode()
        samples = Samples() if segments else agree_on_samples(job, recorded, batch, example)
        verdicts = [_agreed(job, other, found, batch, example) for other, found in zip(further, others)]
        samples = together(verdicts[: len(segments)]) if segments else samples
        options, leaves = job.options, recorded.recording.flatten(*job.arguments(example.batch))
        for verdict in (samples, *verdicts[: len(segments)]):
            options = verdict.options(options)
        plan, graph, costs = agree_on_plan(job, recorded.recording, leaves, options, example.sizes)
        for other, found in zip(further, others):
            other.mode()
            leaves = found.recording.flatten(*job.arguments(example.batch))
            with other.inside():
                prove_step(job, found.recording, leaves, plan, graph, backward=other.trains)
        reference = None
        if options.verify and segments:
            reference = Reference(reason="the step runs its backwards and optimizers itself (manual optimization)")
        elif options.verify and step.trains:
            reference = reference_of(
                recorded.recording, *job.arguments(batch), plan.microbatches, job.context, example.pieces
            )
    if options.sync_mode.mode == "auto":
        options = replace(options, sync=chosen_sync(plan))
    planned = RecordedStep(step.name, recorded.recording, samples.cut, recorded.averaged, recorded.counts)
    runtime = StageRuntime(StageInputs(job.root, plan, graph, planned, job.groups, job.device, options, costs))
    for other, found, verdict in zip(further, others, verdicts):
        runtime.add(RecordedStep(other.name, found.recording, verdict.cut, found.averaged, found.counts))
    runtime.end_set_up()
    return Built(runtime, recorded, samples, example, reference)


def add_step(
    job: Job, runtime: StageRuntime, step: Step, batch: Any, example: Example, leaves: Callable[[Recording], list[Any]]
) -> tuple[Recorded, Samples]:
    """Record a step of a running pipeline, prove it and apply the plan to it. All stages of a replica must call it.

    The model must be whole. `leaves` returns the leaves of the example for the recording.
    """
    recorded = step.record(example)
    segments = () if step.segments is None else tuple(step.segments())
    verdicts = []
    for each in segments or (step,):
        own = each.record(example) if segments else recorded
        samples = _agreed(job, each, own, batch, example, inside_replica=True)
        found = leaves(own.recording)
        with each.inside():
            prove_step(job, own.recording, found, runtime.plan, runtime.graph, each.trains, inside_replica=True)
        runtime.add(RecordedStep(each.name, own.recording, samples.cut, own.averaged, own.counts))
        verdicts.append(samples)
    if segments:  # the whole step is not run; its recording tells for which batches the segments hold
        runtime.add(RecordedStep(step.name, recorded.recording, counts=recorded.counts))
    return recorded, together(verdicts)


def _agreed(
    job: Job, step: Step, recorded: Recorded, batch: Any, example: Example, inside_replica: bool = False
) -> Samples:
    with step.inside():
        return agree_on_samples(job, recorded, batch, example, inside_replica)


@contextmanager
def _modes_kept(root: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in root.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
