"""Pipeline parallelism as a Lightning strategy: speaks Lightning, delegates the work to the runtime."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Optimizer

from pipepart.build import Example, Recorded, Step, build
from pipepart.build.rehearsal import rehearsed
from pipepart.build.step_variants import Variants
from pipepart.build.verification import verification
from pipepart.lightning.ahead import why_not_ahead
from pipepart.lightning.announce import measured_against_predicted, tell
from pipepart.lightning.example import first_batch, open_loader, reopen, steps_ahead
from pipepart.lightning.finetuning import connect_finetuning
from pipepart.lightning.materialise import check_can_be_filled, empty_names, fill, refuse_unfilled
from pipepart.lightning.mesh_strategy import same_weights_everywhere
from pipepart.lightning.options import StrategyOptions
from pipepart.lightning.recording_strategy import flattener
from pipepart.lightning.refusals import check_module, check_optimizers, check_trainer
from pipepart.lightning.replay import replay
from pipepart.lightning.scaler import check_scaled_optimizers, connect_scaler, loss_scale_of
from pipepart.lightning.signals import Signals
from pipepart.lightning.summary import connect_summary
from pipepart.lightning.whole_strategy import WholeStrategy
from pipepart.planning import Plan
from pipepart.planning.request import ScheduleName
from pipepart.recording.inputs.batching import BatchDim
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object, gather_objects
from pipepart.samples.numbers import NOT_KNOWN_AHEAD

__all__ = ["PipelineStrategy"]

_EVALUATION = {
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
_WORTH_A_REHEARSAL = 50
"""Batches: a shorter run is over before it matters what a step takes."""
_TRACED = frozenset({3, 10})
"""Steps of each fit: the first one that is not a warm-up, which short runs reach, and one when the caches have settled."""


class PipelineStrategy(WholeStrategy):
    """Train an unmodified LightningModule as `replicas` pipelines of `stages` stages.

    ```python
    trainer = L.Trainer(strategy=PipelineStrategy(stages=4, microbatches=16), devices=8)   # 2 replicas x 4 stages
    ```

    The whole `training_step` is recorded on the first batch, cut into stages by measured cost, and run on micro-batches.
    `plan` takes a plan that was saved, or the path of its file. `example_batch` is for data that can be read only once.
    With `sharded=True` each stage writes its own part of a checkpoint; by default it is one plain file that Lightning
    loads without pipepart. When a run has ended, every rank has the whole module, as with DDP; with `after="parts"` it
    keeps its part. A module that is built on the meta device is never whole anywhere: each rank fills what it holds.
    All options are in docs/options.md.
    """

    strategy_name: ClassVar[str] = "pipepart"

    def __init__(
        self,
        *,
        stages: int | Literal["auto"] = "auto",
        replicas: int | Literal["auto"] = "auto",
        microbatches: int | Literal["auto"] = "auto",
        schedule: ScheduleName | str = "auto",
        chunks: int | Literal["auto"] = "auto",
        slack: int | Literal["auto"] = "auto",
        keep_together: Sequence[Sequence[str]] = (),
        split_at: Sequence[str] | None = None,
        plan: Plan | str | Path | None = None,
        example_batch: Any = None,
        sharded: bool = False,
        timeout: float = 300.0,
        recompute: bool | Literal["auto"] = "auto",
        memory_limit: float | None = None,
        transport: Literal["auto", "group", "shared_memory"] = "auto",
        batch_norm: Literal["microbatch", "batch"] = "microbatch",
        randomness: Literal["op", "stage"] = "op",
        after: Literal["whole", "parts"] = "whole",
        loss: Literal["batch", "microbatch"] = "batch",
        verify: bool = False,
        batch_dim: BatchDim = 0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        options = StrategyOptions.among(locals())
        super().__init__(options, accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.sharded, self.after = sharded, after
        self._example_batch = example_batch
        self._opened = False
        self._continues = False
        """Gradients of earlier batches wait for the next one, to make one step of the optimizer."""
        self.step_times: list[float] = []
        """Seconds of each training step on this rank, without the optimizer."""
        self.rehearsed: float | None = None
        """Seconds of a step in the rehearsal of the plan, if there was one."""
        self._shown: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan that the runtime carries out, with the step that was measured in its rehearsal."""
        plan = self.runtime.plan
        return plan if self._shown is None else self._shown

    # ---- setting up

    def setup_environment(self) -> None:
        module, trainer = self._module_and_trainer()
        check_trainer(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            check_module(module)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        with guarded(self._groups):  # a rank that fails alone, wherever that is, is not waited for
            self._set_up(trainer)

    def _set_up(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        fitting = trainer.state.fn == TrainerFn.FITTING
        seed = torch.initial_seed()
        self._patches.undo()  # of a run that has ended without a teardown
        connect_finetuning(trainer, self._patches)
        connect_summary(trainer, self._patches)
        self._enter(module, fitting)
        if self._runtime is None:
            self._effects, self._variants = {}, {}
            check_can_be_filled(module)
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
            with isolate_rng():  # random numbers that planning draws do not count
                self._build(trainer, module, "training_step" if fitting else _EVALUATION[TrainerFn(trainer.state.fn)])
        self.runtime.seeds.seed = self.broadcast(seed)
        self._signals = Signals(trainer, self._groups, self.root_device, self._patches)
        if fitting:
            self.step_times, self._continues = [], False
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
            check_scaled_optimizers(self.precision_plugin, self.optimizers)
        self.setup_precision_plugin()
        connect_scaler(self.precision_plugin, self._groups, self.root_device, self._patches)
        self._patches.put(self.precision_plugin, "clip_grad_by_norm", self._clip_grad_by_norm)

    def _build(self, trainer: Trainer, module: LightningModule, step: str) -> None:
        """Record the step on the first batch, agree on a plan, keep this rank's stage."""
        self._empty = bool(empty_names(module))
        same_weights_everywhere(module, self._groups)
        example = self._shared_example(trainer)
        trains = step == "training_step"

        def record(part: Example) -> Recorded:
            return self._recorded(step, self._record(module, step, step, part))

        what = Step(step, record) if trains else Step(step, record, trains, mode=module.eval)
        built = build(self._job(), what, example)
        self._runtime, samples = built.runtime, built.samples
        self._effects[step] = replace(self._effects[step], checked=samples.checked)
        if self._empty:
            self._fill(trainer, module)
        self._variants = {step: Variants(step, [step], 1)}
        self._is_cut(module, self._runtime)
        self._runtime.tracing.numbers = _TRACED
        self.rehearsed, self._shown = None, None
        if trains:  # a plan from a file may have been rehearsed somewhere else
            self.rehearsed = self._rehearse(trainer, example)
            self._shown = replace(self.runtime.plan, rehearsed=self.rehearsed)
        nodes = f"\n{self.describe_nodes()}" if self.num_nodes > 1 else ""
        said = built.notes
        if trainer.accumulate_grad_batches > 1:
            said += self.runtime.weighed(step).notes
            hook = why_not_ahead(trainer, module) if self.runtime.weighed(step).needs_window else ""
            said += (f"{NOT_KNOWN_AHEAD} ({hook} keeps them from being looked at)",) if hook else ()
        notes = "".join(f"\nnote       {note}" for note in said) + samples.lines
        if built.reference is not None:
            names = {built.recorded.recording.loss_index or 0: "loss", **self._effects[step].logged}
            separate, context = self._effects[step].separate, self.precision_plugin.forward_context
            notes += f"\n{verification(self.runtime, built.reference, names, separate, context)}"
        tell(f"pipepart: {type(module).__name__}.{step}\n{self.plan.describe()}{nodes}{notes}\n")

    def _rehearse(self, trainer: Trainer, example: Any) -> float | None:
        """Run some steps on the example, to know what one takes; not before a run that is hardly longer than that."""
        if self._empty or steps_ahead(trainer) < _WORTH_A_REHEARSAL:
            return None
        numbers = dict.fromkeys(("batch_idx", "global_step", "current_epoch", "dataloader_idx"), 0)
        name, leaves = self._variants["training_step"].choose(flattener(example, numbers, self.runtime), self.runtime)
        if name is None:  # the whole batch needs another recording than its first part: made when it is trained on
            return None
        return rehearsed(
            self.runtime,
            leaves,
            outputs_everywhere=True,
            separate=self._effects[name].separate,
            context=self.precision_plugin.forward_context,
            name=name,
        )

    def _fill(self, trainer: Trainer, module: LightningModule) -> None:
        """Memory and values for the parameters and buffers of this stage, after the model was planned without any."""
        held = {*self.runtime.named_parameters(), *self.runtime.held_buffers}
        unfilled = fill(module, held, self.broadcast(torch.initial_seed()), self.root_device)
        if trainer.ckpt_path is not None:  # what a checkpoint has is not needed from elsewhere
            saved = module.state_dict()
            unfilled = [name for name in unfilled if name not in saved]
        lists: list[Any] = [unfilled]
        if self._groups is not None:
            with guarded(self._groups):
                lists = gather_objects(unfilled, self._groups)
        refuse_unfilled(module, {name for names in lists for name in names})
        self.runtime.parts.drop_empty_buffers()

    def _shared_example(self, trainer: Trainer) -> Any:
        """The example of rank 0 for all: ranks must record the same."""
        example = self._example_batch
        if self._example_batch is None:
            loader = open_loader(trainer)
            self._opened = trainer.state.fn == TrainerFn.FITTING
            if self.global_rank == 0:
                example = first_batch(trainer, loader)
        if self._groups is not None:
            example = broadcast_object(example, 0, self._groups)
        return self.batch_to_device(example) if self._example_batch is not None or self.global_rank else example

    # ---- steps

    def training_step(self, batch: Any, batch_idx: int = 0, *args: Any) -> Any:
        """All micro-batches, forward and backward; the new gradients wait until `backward` is called."""
        module, trainer = self._module_and_trainer()
        if tuple(p.requires_grad for p in module.parameters()) != self._trainable:
            self._variants["training_step"].names = []  # a part was frozen or thawed (fine-tuning callbacks)
        name, leaves = self._recording_for("training_step", batch, batch_idx, None)
        # Replicas exchange gradients once for each step of the optimizer; until then each keeps its own.
        accumulates = trainer.fit_loop._should_accumulate()
        reduce = self.mesh.replicas == 1 or not accumulates
        key = self.runtime.seeds.of_step("training_step", trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        ahead = [] if self._continues else self._leaves_ahead(name, batch_idx)
        started = time.perf_counter()
        result = self.runtime.train(
            leaves,
            draw_key=key,
            reduce=reduce,
            continues=self._continues,
            ahead=ahead,
            loss_scale=loss_scale_of(self.precision_plugin, self.root_device) / trainer.accumulate_grad_batches,
            trace=self.runtime.tracing.due(len(self.step_times)),
            outputs_everywhere=True,
            separate=self._effects[name].separate,
            context=self.precision_plugin.forward_context,
            name=name,
        )
        self._continues = accumulates
        self.step_times.append(time.perf_counter() - started)
        return replay(self._effects[name], result, self.runtime.recording(name), module, self.runtime)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The backward has run in the schedule: hand its gradients over where Lightning expects them to appear."""
        module, _ = self._module_and_trainer()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.runtime.hand_over(show_own=True)
        return self.precision_plugin.post_backward(closure_loss, module)

    def validation_step(self, *args: Any) -> Any:
        return self._evaluate("validation_step", *args)

    def test_step(self, *args: Any) -> Any:
        return self._evaluate("test_step", *args)

    def predict_step(self, *args: Any) -> Any:
        return self._evaluate("predict_step", *args)

    def _evaluate(self, step: str, batch: Any, batch_idx: int = 0, dataloader_idx: int | None = None) -> Any:
        module, trainer = self._module_and_trainer()
        name, leaves = self._recording_for(step, batch, batch_idx, dataloader_idx)
        trained = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        result = self.runtime.evaluate(
            name,
            leaves,
            separate=self._effects[name].separate,
            context=self.precision_plugin.forward_context,
            draw_key=self.runtime.seeds.of_step(step, trained, dataloader_idx or 0, batch_idx),
        )
        answer = replay(self._effects[name], result, self.runtime.recording(name), module, self.runtime)
        if self._signals is not None:
            self._signals.agree()
        return answer

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.runtime.clip_grad_norm(list(self.precision_plugin.main_params(optimizer)), clip_val)

    def on_train_start(self) -> None:
        """Planning has opened the loader early: begin it anew where a run on one device does, so that it draws the same."""
        _, trainer = self._module_and_trainer()
        if self._opened:
            self._opened = False
            reopen(trainer)

    def on_train_end(self) -> None:
        tell(measured_against_predicted(self.plan, self.step_times))
