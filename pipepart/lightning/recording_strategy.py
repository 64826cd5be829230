"""The part of the strategy that records steps, and finds the recording that holds for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from pipepart.build import Example, Job, Recorded, Step, add_step, example_microbatch
from pipepart.build.step_variants import Variants, leaves_ahead
from pipepart.errors import CaptureError
from pipepart.lightning.ahead import batches_ahead, why_not_ahead
from pipepart.lightning.announce import tell
from pipepart.lightning.checkpoint_strategy import CheckpointStrategy
from pipepart.lightning.effects import Effects, watched
from pipepart.lightning.example import prepare
from pipepart.recording import Recording, record_step
from pipepart.recording.model_state.places import Place
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object
from pipepart.runtime.microbatch import Whole
from pipepart.samples.pieces import pieces_of

__all__ = ["RecordingStrategy", "flattener"]


def flattener(batch: Any, numbers: Mapping[str, Any], runtime: StageRuntime) -> Callable[[Recording], list[Any]]:
    """The leaves of a batch and of the step's own numbers, as a recording takes them."""

    def flatten(recording: Recording) -> list[Any]:
        wanted = {item.name for item in recording.inputs if item.kind == "number"}
        own = {key: value for key, value in numbers.items() if key in wanted}
        leaves = recording.flatten((batch,), own)
        pieces = pieces_of(batch, runtime.root, runtime.options.batch_dim, False, runtime.plan.microbatches)
        if pieces is None:
            return leaves
        return Whole(leaves, pieces, batch, lambda part: recording.flatten((part,), own))

    return flatten


class RecordingStrategy(CheckpointStrategy):
    """Keeps the recordings of all steps, with their effects."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._effects: dict[str, Effects] = {}
        self._variants: dict[str, Variants] = {}
        self._trainable: tuple[bool, ...] = ()
        self._empty = False
        """The model was built on the meta device, and no rank has ever had all of it."""

    def _record(
        self,
        module: LightningModule,
        name: str,
        step: str,
        example: Example,
        loader: int | None = None,
        batch_idx: int = 0,
        numbers: Sequence[Place] = (),
    ) -> Recording:
        training = step == "training_step"
        effects = watched(module, step, example.batching)
        with self.precision_plugin.forward_context(), torch.set_grad_enabled(training), effects as finish:
            recording = record_step(
                module, step, example.batch, batch_idx=batch_idx, dataloader_idx=loader, numbers=numbers,
                batching=example.batching, others=example.others,
            )  # fmt: skip
        recording, self._effects[name] = finish(recording)
        if training:
            self._trainable = tuple(p.requires_grad for p in module.parameters())
        return recording

    def _recording_for(self, step: str, batch: Any, batch_idx: int, loader: int | None) -> tuple[str, list[Any] | None]:
        """The name of a recording that holds for this batch, and the leaves of the batch on the first stage."""
        numbers = self._numbers(batch_idx, loader)
        key = step if loader is None else f"{step}:{loader}"
        variants = self._variants.setdefault(key, Variants(key))
        for _ in range(2):
            if variants.names:
                name, leaves = variants.choose(flattener(batch, numbers, self.runtime), self.runtime)
                if name is not None:
                    return name, leaves
            self._add(variants, step, batch, batch_idx, loader)
        raise CaptureError(f"{step}: what was recorded on this very batch does not hold for it")

    def _numbers(self, batch_idx: int, loader: int | None) -> dict[str, int]:
        """The numbers of the step itself."""
        _, trainer = self._module_and_trainer()
        return {
            "batch_idx": batch_idx,
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "dataloader_idx": loader or 0,
        }

    def _leaves_ahead(self, name: str, batch_idx: int) -> list[list[Any] | None]:
        """On the first stage, the leaves of the batches that are accumulated with this one, if their numbers are needed.

        Every rank must call it: all take the same number of batches from their loaders.
        """
        module, trainer = self._module_and_trainer()
        if (
            trainer.accumulate_grad_batches == 1
            or not self.runtime.weighed(name).needs_window
            or why_not_ahead(trainer, module)
        ):
            return []
        coming, recording = batches_ahead(trainer), self.runtime.recording(name)
        if not self.runtime.is_first:
            return []
        found: list[list[Any] | None] = []
        for index, batch in enumerate(coming, batch_idx + 1):
            flatten = flattener(prepare(trainer, batch), self._numbers(index, None), self.runtime)
            found.append(leaves_ahead(flatten, recording, self.runtime.plan.microbatches))
        return found

    def _job(self) -> Job:
        module, trainer = self._module_and_trainer()
        context, precision = self.precision_plugin.forward_context, str(trainer.precision)
        return Job(
            module, self._options, self.mesh, self._groups, self.root_device, context=context, precision=precision
        )

    def _recorded(self, name: str, recording: Recording) -> Recorded:
        return Recorded(recording, self._effects[name].reduced_otherwise, self._effects[name].averaged)

    def _add(self, variants: Variants, step: str, batch: Any, batch_idx: int, loader: int | None) -> None:
        """Record a step when it is first needed, or once more, on the batch of the first stage of this replica."""
        module, _ = self._module_and_trainer()
        name, runtime = variants.new_name(), self.runtime
        if self._groups is not None:
            with guarded(self._groups):
                source = self._groups.rank_of_stage(runtime.plan.placement[0])
                batch = broadcast_object(batch, source, self._groups, inside_replica=True)
            batch = self.batch_to_device(batch) if self.global_rank != source else batch
        options = replace(self._options, plan=None, microbatches=runtime.plan.microbatches)
        part = example_microbatch(batch, options, self.mesh, module, fewer=True)

        def record(example: Example) -> Recorded:
            return self._recorded(
                name,
                variants.record(
                    lambda numbers: self._record(module, name, step, example, loader, batch_idx, numbers), runtime
                ),
            )

        # What is empty is recorded by its shapes.
        with runtime.parts.by_shapes() if self._empty else runtime.parts.gathered():
            leaves = flattener(part.batch, self._numbers(batch_idx, loader), runtime)
            trains = step == "training_step"
            _, samples = add_step(self._job(), runtime, Step(name, record, trains), batch, part, leaves)
        self._effects[name] = replace(self._effects[name], checked=samples.checked)
        if samples.text:
            tell(f"pipepart: {type(module).__name__}.{name}{samples.lines}\n")
        for dropped in variants.added(name, runtime):
            del self._effects[dropped]

    def _module_and_trainer(self) -> tuple[LightningModule, Trainer]:
        assert self.lightning_module is not None
        return self.lightning_module, self.lightning_module.trainer
