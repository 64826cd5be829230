"""Pipeline parallelism as a Lightning strategy: speaks Lightning, delegates the work to the runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Optimizer

from pipepart.capture import Recording, record_step
from pipepart.errors import CaptureError
from pipepart.planning import Plan, check_request
from pipepart.runtime import Options, StageRuntime, agree_on_plan, example_microbatch
from pipepart.runtime.batch_norm import check_batch_norm
from pipepart.runtime.failure import guarded
from pipepart.runtime.microbatch import batch_size_of, microbatch_sizes, slice_leaves
from pipepart.runtime.rehearsal import rehearsed
from pipepart.runtime.transport import check_transport
from pipepart.strategy.checkpoint_strategy import CheckpointStrategy
from pipepart.strategy.console import measured_against_predicted, tell
from pipepart.strategy.effects import Effects, watched
from pipepart.strategy.example import first_batch, open_loader, reopen, steps_ahead
from pipepart.strategy.finetuning import connect_finetuning
from pipepart.strategy.materialise import check_can_be_filled, empty_names, fill, refuse_unfilled
from pipepart.strategy.mesh_strategy import same_weights_everywhere
from pipepart.strategy.metrics import connect_metrics
from pipepart.strategy.recordings import Variants
from pipepart.strategy.refusals import check_module, check_optimizers, check_trainer
from pipepart.strategy.replay import replay
from pipepart.strategy.scaler import connect_scaler, loss_scale_of
from pipepart.strategy.signals import Signals

__all__ = ["PipelineStrategy"]

_EVALUATION = {
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
_WORTH_A_REHEARSAL = 50
"""Batches: a shorter run is over before it matters what a step takes."""
_CUT = "_pipepart_cut"
"""The attribute of a module of which this process holds a part only: what can make it whole again."""


class _Cut:
    """Keeps the runtime with its module; copies and pickles of the module go without."""

    def __init__(self, runtime: StageRuntime | None = None) -> None:
        self.runtime = runtime

    def __reduce__(self) -> Any:
        return _Cut, ()


class PipelineStrategy(CheckpointStrategy):
    """Train an unmodified LightningModule as `replicas` pipelines of `stages` stages.

    ```python
    trainer = L.Trainer(strategy=PipelineStrategy(stages=4, microbatches=16), devices=8)   # 2 replicas x 4 stages
    ```

    The whole `training_step` is recorded on the first batch, cut into stages by measured cost, and run on micro-batches.
    `plan` takes a plan that was saved. `example_batch` is for data that can be read only once. With `sharded=True` each
    stage writes its own part of a checkpoint; by default it is one plain file that Lightning loads without pipepart.
    A module that is built on the meta device is never whole anywhere: each rank fills what it holds.
    """

    strategy_name: ClassVar[str] = "pipepart"

    def __init__(
        self,
        stages: int | str = "auto",
        replicas: int | str = "auto",
        microbatches: int | str = "auto",
        schedule: str = "auto",
        chunks: int | str = "auto",
        slack: int | str = "auto",
        keep_together: Sequence[Sequence[str]] = (),
        split_at: Sequence[str] | None = None,
        plan: Plan | str | None = None,
        example_batch: Any = None,
        sharded: bool = False,
        timeout: float = 300.0,
        recompute: bool | str = "auto",
        memory_limit: float | None = None,
        transport: str = "auto",
        batch_norm: str = "microbatch",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_request(schedule, microbatches, stages, recompute)
        check_transport(transport)
        check_batch_norm(batch_norm)
        loaded = Plan.load(plan) if isinstance(plan, str) else plan
        options = Options(
            loaded.stages if loaded else stages, loaded.replicas if loaded else replicas, microbatches, schedule, chunks,
            slack, keep_together, split_at, loaded, timeout, transport, recompute, memory_limit,
            batch_norm,
        )  # fmt: skip
        super().__init__(options, accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.sharded = sharded
        self._example_batch = example_batch
        self._effects: dict[str, Effects] = {}
        self._variants: dict[str, Variants] = {}
        self._trainable: tuple[bool, ...] = ()
        self._empty = False
        """The model was built on the meta device, and no rank has ever had all of it."""
        self._signals: Signals | None = None
        self._opened = False
        self._undo_metrics: Callable[[], None] = lambda: None
        self.step_times: list[float] = []
        """Seconds of each training step on this rank, without the optimizer."""

    @property
    def plan(self) -> Plan:
        return self.runtime.plan

    # ---- setting up

    def setup_environment(self) -> None:
        module, trainer = self._module_and_trainer()
        check_trainer(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            check_module(module)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        fitting = trainer.state.fn == TrainerFn.FITTING
        connect_finetuning(trainer)
        self._release_other_model(module, fitting)
        if self._runtime is None:
            check_can_be_filled(module)
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
            with isolate_rng():  # random numbers that planning draws do not count
                self._build(trainer, module, "training_step" if fitting else _EVALUATION[TrainerFn(trainer.state.fn)])
        self._signals = Signals(trainer, self._groups, self.root_device)
        if fitting:
            self.step_times = []
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        connect_scaler(self.precision_plugin, self._groups, self.root_device)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    def _release_other_model(self, module: LightningModule, fitting: bool) -> None:
        """A runtime of another model, or one that was planned for evaluation alone, gives way to a new one."""
        runtime = self._runtime
        if runtime is not None and not (runtime.root is module and (runtime.has("training_step") or not fitting)):
            self.make_whole()
        elif runtime is None:
            left = module.__dict__.pop(_CUT, None)  # by another trainer
            if left is not None and left.runtime is not None:
                left.runtime.make_whole()

    def make_whole(self) -> None:
        """All parameters on every rank again, as after a run on one device. All ranks must call it together."""
        self._undo_metrics()
        runtime, self._runtime, self._effects, self._variants = self._runtime, None, {}, {}
        if runtime is not None:
            runtime.root.__dict__.pop(_CUT, None)
            runtime.make_whole()

    def _build(self, trainer: Trainer, module: LightningModule, step: str) -> None:
        """Record the step on the first batch, agree on a plan, keep this rank's stage."""
        with guarded(self._groups):
            self._empty = bool(empty_names(module))
            same_weights_everywhere(module, self._groups)
            example = self._shared_example(trainer)
        microbatch, usual = example_microbatch(example, self._options, self.mesh)
        modes = {part: part.training for part in module.modules()}
        if step != "training_step":
            module.eval()
        recording = self._record(module, step, step, microbatch)
        leaves = recording.flatten((microbatch,), {})
        plan, graph, costs = agree_on_plan(
            recording, leaves, self._options, self.mesh, usual, self._groups,
            self.precision_plugin.forward_context, str(trainer.precision),
        )  # fmt: skip
        for part, mode in modes.items():
            part.training = mode
        options = self._options
        self._runtime = StageRuntime(
            module,
            plan,
            graph,
            recording,
            self._groups,
            self.root_device,
            options.timeout,
            step,
            options.transport,
            costs,
            options.batch_norm,
        )
        if self._empty:
            self._fill(trainer, module)
        self._variants = {step: Variants(step, [step], 1)}
        self._undo_metrics = connect_metrics(module, self._runtime)
        if self._groups is not None:
            module.__dict__[_CUT] = _Cut(self._runtime)
        if step == "training_step":
            self._rehearse(trainer, example)
        nodes = f"\n{self.describe_nodes()}" if self.num_nodes > 1 else ""
        notes = "".join(f"\nnote       {note}" for note in recording.notes)
        tell(f"pipepart: {type(module).__name__}.{step}\n{self.plan.describe()}{nodes}{notes}\n")

    def _rehearse(self, trainer: Trainer, example: Any) -> None:
        """Run some steps on the example, to know what one takes; not before a run that is hardly longer than that."""
        self.runtime.plan = replace(self.plan, rehearsed=None)  # a plan from a file was rehearsed somewhere else
        if self._empty or steps_ahead(trainer) < _WORTH_A_REHEARSAL:
            return
        numbers = dict.fromkeys(("batch_idx", "global_step", "current_epoch", "dataloader_idx"), 0)
        name, leaves = self._variants["training_step"].choose(example, numbers, self.runtime)
        if name is None:  # the whole batch needs another recording than its first part: made when it is trained on
            return
        seconds = rehearsed(
            self.runtime,
            leaves,
            outputs_everywhere=True,
            separate=self._effects[name].separate,
            context=self.precision_plugin.forward_context,
            name=name,
        )
        self.runtime.plan = replace(self.plan, rehearsed=seconds)

    def _fill(self, trainer: Trainer, module: LightningModule) -> None:
        """Memory and values for the parameters and buffers of this stage, after the model was planned without any."""
        held = {*self.runtime.named_parameters(), *self.runtime.held_buffers}
        unfilled = fill(module, held, self.broadcast(torch.initial_seed()), self.root_device)
        if trainer.ckpt_path is not None:  # what a checkpoint has is not needed from elsewhere
            saved = module.state_dict()
            unfilled = [name for name in unfilled if name not in saved]
        lists: list[Any] = [unfilled]
        if self._groups is not None:
            lists = [None] * self.mesh.world_size
            with guarded(self._groups):
                dist.all_gather_object(lists, unfilled)
        refuse_unfilled(module, {name for names in lists for name in names})

    def _shared_example(self, trainer: Trainer) -> Any:
        """The example of rank 0 for all: ranks must record the same."""
        box = [self._example_batch]
        if self._example_batch is None:
            loader = open_loader(trainer)
            self._opened = trainer.state.fn == TrainerFn.FITTING
            if self.global_rank == 0:
                box = [first_batch(trainer, loader)]
        if self._groups is not None:
            dist.broadcast_object_list(box, 0)
        return self.batch_to_device(box[0]) if self._example_batch is not None or self.global_rank else box[0]

    def _record(
        self, module: LightningModule, name: str, step: str, batch: Any, loader: int | None = None, batch_idx: int = 0
    ) -> Recording:
        training = step == "training_step"
        with self.precision_plugin.forward_context(), torch.set_grad_enabled(training), watched(module, step) as finish:
            recording = record_step(module, step, batch, batch_idx=batch_idx, dataloader_idx=loader)
        self._effects[name] = finish(recording)
        if training:
            self._trainable = tuple(p.requires_grad for p in module.parameters())
        return recording

    # ---- steps

    def training_step(self, batch: Any, batch_idx: int = 0, *args: Any) -> Any:
        """All micro-batches, forward and backward; the new gradients wait until `backward` is called."""
        module, trainer = self._module_and_trainer()
        if tuple(p.requires_grad for p in module.parameters()) != self._trainable:
            self._variants["training_step"].names = []  # a part was frozen or thawed (fine-tuning callbacks)
        name, leaves = self._recording_for("training_step", batch, batch_idx, None)
        # Replicas exchange gradients once for each step of the optimizer; until then each keeps its own.
        reduce = self.mesh.replicas == 1 or not trainer.fit_loop._should_accumulate()
        started = time.perf_counter()
        result = self.runtime.train(
            leaves,
            reduce=reduce,
            loss_scale=loss_scale_of(self.precision_plugin, self.root_device) / trainer.accumulate_grad_batches,
            trace=len(self.step_times) in (3, 10),
            outputs_everywhere=True,
            separate=self._effects[name].separate,
            context=self.precision_plugin.forward_context,
            name=name,
        )
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
        module, _ = self._module_and_trainer()
        name, leaves = self._recording_for(step, batch, batch_idx, dataloader_idx)
        result = self.runtime.evaluate(
            name, leaves, separate=self._effects[name].separate, context=self.precision_plugin.forward_context
        )
        answer = replay(self._effects[name], result, self.runtime.recording(name), module, self.runtime)
        if self._signals is not None:
            self._signals.agree()
        return answer

    def _recording_for(self, step: str, batch: Any, batch_idx: int, loader: int | None) -> tuple[str, list[Any] | None]:
        """The name of a recording that holds for this batch, and the leaves of the batch on the first stage."""
        _, trainer = self._module_and_trainer()
        numbers = {
            "batch_idx": batch_idx,
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "dataloader_idx": loader or 0,
        }
        key = step if loader is None else f"{step}:{loader}"
        variants = self._variants.setdefault(key, Variants(key))
        for _ in range(2):
            if variants.names:
                name, leaves = variants.choose(batch, numbers, self.runtime)
                if name is not None:
                    return name, leaves
            self._add(variants, step, batch, batch_idx, loader)
        raise CaptureError(f"{step}: what was recorded on this very batch does not hold for it")

    def _add(self, variants: Variants, step: str, batch: Any, batch_idx: int, loader: int | None) -> None:
        """Record a step when it is first needed, or once more, on the batch of the first stage of this replica."""
        module, _ = self._module_and_trainer()
        name = variants.new_name()
        if self._groups is not None:
            box = [batch]
            with guarded(self._groups):
                source = self._groups.rank_of_stage(self.plan.placement[0])
                dist.broadcast_object_list(box, source, group=self._groups.pipeline)
            batch = self.batch_to_device(box[0]) if self.global_rank != source else batch
        leaves, tree = pytree.tree_flatten(batch)
        total = batch_size_of(leaves)
        parts = slice_leaves(leaves, microbatch_sizes(total, min(total, self.plan.microbatches)))
        with nullcontext() if self._empty else self.runtime.gathered():  # what is empty is recorded by its shapes
            recording = self._record(module, name, step, pytree.tree_unflatten(parts[0], tree), loader, batch_idx)
            self.runtime.add(name, recording)
        variants.names.insert(0, name)

    def _module_and_trainer(self) -> tuple[LightningModule, Trainer]:
        assert self.lightning_module is not None
        return self.lightning_module, self.lightning_module.trainer

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

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and self._signals is not None and self._runtime is not None:
            self._signals.save()

    def teardown(self) -> None:
        """Not the base class's: that one moves the module to the CPU, which parameters of other stages cannot."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
