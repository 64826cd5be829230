"""The one path from a model and an example batch to a running stage, shared by `Pipeline` and the Lightning strategy.

    record all steps on every rank -> check samples -> agree on a plan -> prove its chunks -> make the runtime

`pipepart plan`, which starts no processes, takes the same first step (`record_example`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipepart.build.agreement import Example, agree_on_plan, example_microbatch, prove_laid
from pipepart.build.batch_verdict import Samples, agree_on_samples
from pipepart.build.foreign_collectives import recording_on_every_rank
from pipepart.build.verification import Reference, reference_of
from pipepart.options import Options
from pipepart.recording import Recording
from pipepart.runtime import Groups, Mesh, StageRuntime

__all__ = ["Built", "Job", "Recorded", "Step", "add_step", "build", "record_example"]


@dataclass(frozen=True)
class Job:
    """A model, the options of its user, and the processes that run it."""

    root: nn.Module
    options: Options
    mesh: Mesh
    groups: Groups | None
    device: torch.device
    call: bool = False
    """A batch is a pair of positional and named arguments; else it is one argument."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The precision that steps run under."""
    precision: str = ""
    """Its name."""

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A batch as the arguments of a recorded call."""
        args, kwargs = batch if self.call else ((batch,), {})
        return args, kwargs


@dataclass(frozen=True)
class Recorded:
    """A recorded step, and what the runtime must know of its outputs."""

    recording: Recording
    free: frozenset[int] = frozenset()
    """Outputs that are put together in another way than means and batches."""
    averaged: frozenset[int] = frozenset()
    """Outputs whose values are averaged over replicas after the step."""


@dataclass(frozen=True)
class Step:
    """One step of the model, and how it is recorded on an example."""

    name: str
    record: Callable[[Example], Recorded]
    trains: bool = True
    mode: Callable[[], Any] = lambda: None
    """Puts the model into the mode of this step; the modes that the modules had come back afterwards."""


@dataclass(frozen=True)
class Built:
    """A stage that is ready to run, and what was found on the way."""

    runtime: StageRuntime
    recorded: Recorded
    samples: Samples
    """Whether micro-batches make up the whole batch in the first step, and what is done about it."""
    example: Example
    reference: Reference | None
    """What one process gives on the example, if it was asked for."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of the recording and of its costs."""
        costs = self.runtime.costs
        return (*self.recorded.recording.notes, *(costs.notes if costs is not None else ()))


def record_example(job: Job, step: Step, batch: Any) -> tuple[Example, Recorded]:
    """The first micro-batch of a batch, and the step recorded with it. Every rank must call it."""
    example = example_microbatch(batch, job.options, job.mesh, job.root, job.call)
    return example, _recorded(job, step, example)


def _recorded(job: Job, step: Step, example: Example) -> Recorded:
    step.mode()
    with recording_on_every_rank(job.groups, job.root):
        return step.record(example)


def build(job: Job, step: Step, batch: Any, further: Sequence[Step] = ()) -> Built:
    """Record the step, plan it, and keep this rank's stage of the model. Every rank must call it with the same batch.

    The plan is made for `step` and laid over the `further` steps, which are recorded while the model is still whole.
    """
    with _modes_kept(job.root):
        example, recorded = record_example(job, step, batch)
        others = [_recorded(job, other, example) for other in further]
        step.mode()
        samples = _samples(job, recorded, batch, example)
        cuts = [_samples(job, other, batch, example).cut for other in others]
        options, leaves = samples.options(job.options), recorded.recording.flatten(*job.arguments(example.batch))
        plan, graph, costs = agree_on_plan(
            recorded.recording, leaves, options, job.mesh, example.sizes, job.groups, job.context, job.precision
        )
        for other, found in zip(further, others):
            other.mode()
            leaves = found.recording.flatten(*job.arguments(example.batch))
            prove_laid(found.recording, leaves, plan, graph, job.groups, job.context, backward=other.trains)
        reference = None
        if options.verify and step.trains:
            reference = reference_of(
                recorded.recording, *job.arguments(batch), plan.microbatches, job.context, example.pieces
            )
    runtime = StageRuntime(
        job.root, plan, graph, recorded.recording, job.groups, job.device, step.name, options, costs, samples.cut,
        recorded.averaged,
    )  # fmt: skip
    for other, found, cut in zip(further, others, cuts):
        runtime.add(other.name, found.recording, cut, found.averaged)
    return Built(runtime, recorded, samples, example, reference)


def add_step(
    job: Job, runtime: StageRuntime, step: Step, batch: Any, example: Example, leaves: Callable[[Recording], list[Any]]
) -> tuple[Recorded, Samples]:
    """Record a step of a running pipeline, prove it and lay the plan over it. All stages of a replica must call it.

    The model must be whole. `leaves` gives those of the example as the recording takes them.
    """
    recorded = step.record(example)
    samples = _samples(job, recorded, batch, example, inside_replica=True)
    prove_laid(
        recorded.recording, leaves(recorded.recording), runtime.plan, runtime.graph, job.groups, job.context,
        backward=step.trains, inside_replica=True,
    )  # fmt: skip
    runtime.add(step.name, recorded.recording, samples.cut, recorded.averaged)
    return recorded, samples


def _samples(job: Job, recorded: Recorded, batch: Any, example: Example, inside_replica: bool = False) -> Samples:
    return agree_on_samples(
        recorded.recording, *job.arguments(batch), example.sizes.sizes[0], job.groups, recorded.free, inside_replica,
        job.options.loss, example.pieces,
    )  # fmt: skip


@contextmanager
def _modes_kept(root: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in root.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
