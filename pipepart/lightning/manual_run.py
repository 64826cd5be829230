"""Manual optimization in a pipeline: the segments of a step are run in order, and its acts are repeated between them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from pipepart.build import Job, Recorded, Step
from pipepart.errors import CaptureError
from pipepart.lightning.manual_step import ManualAct, ManualNotes, OptimizerOutline, outline_of
from pipepart.lightning.namespaces import of
from pipepart.lightning.noted_effects import Effects
from pipepart.lightning.random_states import isolate_rng
from pipepart.recording import Recording
from pipepart.recording.proof.segment_proof import prove_segments, restored_after, trained_only
from pipepart.recording.segments import Segment, cut_segments
from pipepart.runtime import StageRuntime, StepRequest
from pipepart.runtime.failure import guarded
from pipepart.runtime.microbatch import MicrobatchSizes, fitting_sizes
from pipepart.runtime.program import StepResult

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["ManualSteps"]


@dataclass(frozen=True, eq=False)
class _Script:
    """A recorded step with manual optimization: its acts and its segments, with their names in the runtime."""

    recording: Recording
    done: tuple[ManualAct, ...]
    segments: Mapping[str, Segment]


class ManualSteps:
    """The recordings of a training step with manual optimization."""

    def __init__(self, job: Job, module: LightningModule, has_optimizers: bool = False) -> None:
        """The module must be whole. `has_optimizers`: those of the run have been made already."""
        self._job, self._module = job, module
        self.outline = _outline(module, has_optimizers)
        self._scripts: dict[str, _Script] = {}
        self.seconds = 0.0
        """The time of the segments of the last step, without its acts."""

    def cut(self, name: str, recording: Recording, notes: ManualNotes, batch: Any, numbers: Mapping[str, int]) -> None:
        """Cut a recorded step into segments and prove them on the example `batch`."""
        known = {item.name for item in recording.inputs}
        numbers = {key: value for key, value in numbers.items() if key in known}
        acts, own = notes.acts, 1 + notes.backwards if notes.backwards else 0
        wanted = range(own, len(_outputs(recording)))
        redraws = self._job.options.randomness == "op"
        segments = cut_segments(recording, acts, notes.frozen, wanted, numbers, redraws)
        prove_segments(recording, segments, acts, notes.frozen, recording.flatten((batch,), numbers), self._job.context)
        names = {f"{name}/{index + 1}": segment for index, segment in enumerate(segments)}
        self._scripts[name] = _Script(recording, tuple(notes.recorded), names)

    def steps(self, name: str, effects: Mapping[str, Effects]) -> list[Step]:
        """The segments of a recorded step, as steps for the runtime."""
        own = effects[name]
        if name == "training_step" and not any(segment.has_loss for segment in self._scripts[name].segments.values()):
            raise CaptureError(
                f"{type(self._module).__name__}.training_step runs no backward for the first batch: there is nothing to plan.\n"
                "  expected: at least one manual_backward\n  do: begin with a batch that is trained on"
            )
        return [
            Step(
                key,
                lambda example, segment=segment: Recorded(  # type: ignore[misc]
                    segment.recording, _positions(segment, own.reduced_otherwise), _positions(segment, own.averaged)
                ),
                trains=segment.has_loss,
                inside=partial(trained_only, self._module, segment.trained),
            )
            for key, segment in self._scripts[name].segments.items()
        ]

    def check(self, name: str, runtime: StageRuntime) -> None:
        """Refuse a step whose carried values cannot be put together from those of micro-batches."""
        segments = self._scripts[name].segments
        rows = {what for segment in segments.values() for what in _with_samples(segment)}
        for key, segment in segments.items():
            batching = segment.recording.batching
            pieces = batching is not None and batching.in_pieces
            for what, law in zip(segment.makes, runtime.laws(key)):
                unknown = law == "unknown" and what not in rows and runtime.plan.microbatches > 1
                if isinstance(what, str) and (pieces or unknown):
                    raise CaptureError(
                        f"{name}: the value {what} is computed in one part of the step and used in another, after an optimizer "
                        "has changed the parameters that it depends on. How the values of micro-batches make up that of the "
                        f"batch is not known{', since the batch is split as a container' if pieces else ''}.\n"
                        "  expected: a value with the samples in dimension 0, or a mean over samples\n"
                        f"  do: compute it again in the later part{'' if pieces else ', or use microbatches=1'}"
                    )

    def describe(self, name: str) -> str:
        """The segments in words, for the start message."""
        script = self._scripts[name]
        carried = sum(len(segment.takes) for segment in script.segments.values())
        losses = sum(segment.has_loss for segment in script.segments.values())
        more = f", {carried} value(s) carried from one to another" if carried else ""
        count = len(script.segments)
        return f"manual optimization: {losses} backward(s), run as {count} pipeline(s) over the same stages{more}"

    def drop(self, name: str, runtime: StageRuntime) -> None:
        """Remove a recorded step."""
        script = self._scripts.pop(name, None)
        for key in () if script is None else script.segments:
            runtime.drop(key)

    # ---- a step

    def train(
        self, name: str, runtime: StageRuntime, leaves: Sequence[Any] | None, draw_key: int | None, effects: Effects
    ) -> StepResult:
        """Run the segments and repeat the acts between them. Returns the outputs of the whole recorded step."""
        script, self.seconds = self._scripts[name], 0.0
        outputs = [None if isinstance(value, fx.Node) else value for value in _outputs(script.recording)]
        laws = ["constant"] * len(outputs)
        carried: dict[str, torch.Tensor] = {}
        losses: list[torch.Tensor] = []
        result: StepResult | None = None
        waiting = list(script.segments.items())
        for moment, act in enumerate((*script.done, None)):
            while waiting and waiting[0][1].moment == moment:
                key, segment = waiting.pop(0)
                request = StepRequest(
                    leaves=_with_carried(leaves, segment, carried),
                    outputs_everywhere=True,
                    separate=_positions(segment, effects.separate),
                    context=self._job.context,
                    draw_key=draw_key,
                )
                started = time.perf_counter()
                with _alone(runtime, segment):
                    result = (runtime.train if segment.has_loss else runtime.evaluate)(request, key)
                self.seconds += time.perf_counter() - started
                for index, what in enumerate(segment.makes):
                    if isinstance(what, str):
                        carried[what] = result.outputs[index]
                    else:
                        outputs[what], laws[what] = result.outputs[index], result.laws[index]
                if segment.has_loss:
                    losses.append(result.outputs[0])
            if act is not None:
                # In the context of the precision, as in one process, where the whole step runs inside of it.
                with guarded(runtime.groups), self._job.context():
                    self._repeat(act, losses)
        if result is None:
            sizes = self._sizes(script.recording, runtime, leaves)
            return StepResult(outputs, sizes, tuple(laws), sizes.batch_size)
        return replace(result, outputs=outputs, laws=tuple(laws))

    def _sizes(self, recording: Recording, runtime: StageRuntime, leaves: Sequence[Any] | None) -> MicrobatchSizes:
        found: tuple[int, ...] = ()
        if runtime.is_first:
            assert leaves is not None
            with guarded(runtime.groups):
                sizes = fitting_sizes(recording, leaves, runtime.plan.microbatches)
                assert sizes is not None
                found = sizes.sizes
        return MicrobatchSizes(tuple(runtime.from_first(found)))

    def _repeat(self, act: ManualAct, losses: list[torch.Tensor]) -> None:
        """Repeat one act, on every rank."""
        module, options = self._module, dict(act.options)
        trainer = module.trainer
        if act.kind == "backward":
            trainer.strategy.backward(losses[act.index], None)
        elif act.kind == "step":
            counts: Any = trainer.strategy._lightning_optimizers[act.index]
            optimizer = counts if options["counts"] else trainer.optimizers[act.index]
            optimizer.step(**dict(options["given"]))
        elif act.kind == "zero_grad":
            trainer.optimizers[act.index].zero_grad(set_to_none=options["set_to_none"])
        elif act.kind == "clip_gradients":
            module.clip_gradients(trainer.optimizers[act.index], options["value"], options["algorithm"])
        elif act.kind == "scheduler_step":
            scheduler: Any = trainer.lr_scheduler_configs[act.index].scheduler
            scheduler.step()


def _outline(module: LightningModule, made: bool) -> OptimizerOutline:
    """The outline of the optimizers of the run, if they are made. Else they are made after planning, and others before it:
    `configure_optimizers` is called once more, on the whole module."""
    if made:
        return outline_of(module, module.trainer.optimizers, len(module.trainer.lr_scheduler_configs))
    with isolate_rng():
        optimizers, schedulers = of(module)._init_optimizers_and_lr_schedulers(module)
    return outline_of(module, optimizers, len(schedulers))


def _outputs(recording: Recording) -> list[Any]:
    output: fx.Node = next(reversed(recording.graph.nodes))
    results: Any = output.args[0]
    return list(results)


def _positions(segment: Segment, outputs: Collection[int]) -> frozenset[int]:
    """The positions of these outputs of the whole recording among the outputs of a segment."""
    return frozenset(index for index, what in enumerate(segment.makes) if what in outputs)


def _with_samples(segment: Segment) -> list[str]:
    """The values that a segment takes with samples in dimension 0."""
    batching, first = segment.recording.batching, len(segment.recording.inputs) - len(segment.takes)
    places = batching.places if batching is not None else ()
    return [name for index, name in enumerate(segment.takes, first) if index in places]


def _with_carried(
    leaves: Sequence[Any] | None, segment: Segment, carried: Mapping[str, torch.Tensor]
) -> Sequence[Any] | None:
    if leaves is None or not segment.takes:
        return leaves
    given = []
    for name, spec in zip(segment.takes, segment.recording.inputs[-len(segment.takes) :]):
        value = carried[name]
        assert spec.dtype is not None
        rounded = value.round() if value.is_floating_point() and not spec.dtype.is_floating_point else value
        given.append(rounded.to(spec.dtype))
    return [*leaves, *given]


@contextmanager
def _alone(runtime: StageRuntime, segment: Segment) -> Any:
    """Inside, this stage trains the parameters of a segment only; buffers that it changes a second time are set back."""
    own = list(runtime.named_parameters().items())
    with trained_only(runtime.root, segment.trained, own), restored_after(runtime.root, segment.restored):
        yield
