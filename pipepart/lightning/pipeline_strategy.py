"""Pipeline parallelism as a Lightning strategy. It implements Lightning's interface and delegates all work."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from pipepart.build import Job
from pipepart.devices import limit_threads, local_device
from pipepart.lightning.announce import measured_against_predicted, said, tell
from pipepart.lightning.apart import ReplicasApart
from pipepart.lightning.as_written import AsWritten, is_undivided
from pipepart.lightning.binding import BoundStrategy
from pipepart.lightning.checkpoint_files import safe_by_default
from pipepart.lightning.clipping import connect_clipping
from pipepart.lightning.data import reopen, steps_ahead
from pipepart.lightning.divided_updates import check_borrowing, follow_updates, show_gradients
from pipepart.lightning.hooks import HookedStrategy, follow_hooks, outside_hooks
from pipepart.lightning.kept_on_host import only_shapes, too_large
from pipepart.lightning.known_ranks import KnownRanks
from pipepart.lightning.late_plan import LatePlans
from pipepart.lightning.launcher import launcher_for
from pipepart.lightning.loss_scaling import LossScaling, match_device
from pipepart.lightning.materialise import check_can_be_filled, empty_names, fill_stage
from pipepart.lightning.namespaces import of
from pipepart.lightning.own_backward import hand_over_by_backward
from pipepart.lightning.ranks import RankCollectives
from pipepart.lightning.ray_workers import refuse_shards_by_rank
from pipepart.lightning.read_once import read_once
from pipepart.lightning.recorded_steps import RecordedSteps
from pipepart.lightning.refusals import check_module, check_optimizers, check_steps, check_trainer
from pipepart.lightning.replica_counts import counted_by_replicas
from pipepart.lightning.run_features import RunFeatures
from pipepart.lightning.run_parts import RunParts
from pipepart.lightning.run_patches import Signals, connect_callbacks
from pipepart.lightning.skipped_steps import allow_skipped_batches
from pipepart.lightning.step_clock import StepClock
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.lightning.sync_states import add_sync_states, load_sync_states
from pipepart.lightning.wholeness import move_to_device
from pipepart.planning import Plan
from pipepart.planning.compile_mode import CompileOption
from pipepart.planning.head_mode import HeadOption
from pipepart.planning.request import ScheduleName
from pipepart.planning.sync_mode import SyncOption
from pipepart.recording.inputs.batching import BatchDim
from pipepart.report.account import Account
from pipepart.runtime import Mesh
from pipepart.runtime.failure import guarded

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ParallelStrategy
else:
    ParallelStrategy = object  # the class of the trainer's namespace, when the trainer connects the strategy

__all__ = ["PipelineStrategy"]

_EVALUATION: dict[Any, str] = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_TRACED = frozenset({3, 10})
"""Traced steps of each fit: the first one after the warm-up, which short runs reach, and one with settled caches."""


@outside_hooks(
    "training_step", "backward", "lightning_module_state_dict", "optimizer_state", "save_checkpoint", "make_whole",
    "barrier", "broadcast", "reduce", "all_gather", "reduce_boolean_decision",
)  # fmt: skip
class PipelineStrategy(
    LatePlans,
    RunParts,
    KnownRanks,
    BoundStrategy,
    HookedStrategy,
    ReplicasApart,
    RankCollectives,
    RunFeatures,
    ParallelStrategy,
):
    """Train an unmodified LightningModule as `replicas` pipelines of `stages` stages.

    ```python
    trainer = L.Trainer(strategy=PipelineStrategy(stages=4, microbatches=16), devices=8)   # 2 replicas x 4 stages
    ```

    The whole `training_step` is recorded on the first batch, cut into stages by measured cost, and run on micro-batches.
    `plan` is a plan, or the path of its file. `example_batch` is for data that can be read only once. With
    `sharded=True` each stage writes its own part of a checkpoint; by default a checkpoint is one plain file that Lightning
    loads without pipepart. After a run every rank has the whole module, as with DDP; with `after="parts"` it keeps its
    part. A module that is built on the meta device is never whole on any rank: each rank fills the part that it holds.
    docs/options.md lists all options, and docs/howto has a section for each.
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
        head: HeadOption = "auto",
        transport: Literal["auto", "group", "shared_memory"] = "auto",
        batch_norm: Literal["microbatch", "batch"] = "microbatch",
        randomness: Literal["op", "stage"] = "op",
        after: Literal["whole", "parts"] = "whole",
        loss: Literal["batch", "microbatch"] = "batch",
        verify: bool = False,
        batch_dim: BatchDim = 0,
        sync: SyncOption = "mean",
        compile: CompileOption = False,
        accelerator: Any = None,  # the last five: of the namespace of the trainer
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        options = StrategyOptions.among(locals())
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._options = options
        self.num_nodes = 1
        self._layer_sync: Any = None  # set by the trainer for sync_batchnorm=True
        self._make_parts()
        self.sharded, self.after = sharded, after
        self.step_times: list[float] = []
        """Seconds of each training step of the last fit on this rank, without the optimizer."""
        self.as_written = True
        """Whether steps that cannot be recorded may run as they are written, where one process has nothing to divide."""
        self.account: Account | None = None
        """Where the time of a step of the last fit has gone, on rank 0. None elsewhere, with manual optimization, and if no
        step was traced."""
        self.rehearsed: float | None = None
        """Seconds of a step in the rehearsal of the plan, if there was one."""

    def make_whole(self) -> None:
        """Gather all values on every rank and forget the plan. All ranks must call it together."""
        self._steps = None
        self._whole.make_whole()

    # ---- ranks

    @property
    def mesh(self) -> Mesh:
        """The replicas and stages of this job, and the place of each rank."""
        return self._ranks.mesh

    @property
    def is_distributed(self) -> bool:
        """Whether data is divided among ranks. The stages of one replica work on the same data."""
        return self.mesh.replicas > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.replicas, "rank": self.mesh.replica_of(self.global_rank)}

    def process_dataloader(self, dataloader: Any) -> Any:
        early = self._steps is None and not self._late  # planning opens it before the run does
        kept = read_once(dataloader) if early else dataloader
        return self._ranks.loader(self._batches.loader(kept), self._whole.decide)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if device is None and self._batches.stay_on_host():
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    # ---- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = safe_by_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._whole.runtime is None and not self.sharded:  # before a run, and in a run without data
            return super().lightning_module_state_dict()
        return self._checkpoints.model_state(self.runtime)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._whole.runtime is None and not self.sharded:
            return super().optimizer_state(optimizer)
        return self._checkpoints.optimizer_state(optimizer, self.runtime)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        runtime = self.runtime if self.sharded else self._whole.runtime
        add_sync_states(checkpoint, self.optimizers, runtime)
        self._checkpoints.save(checkpoint, filepath, runtime, self.checkpoint_io, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.load(checkpoint_path, self.checkpoint_io, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_model(checkpoint, self._module_and_trainer()[0], self._whole.runtime, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(checkpoint, self.optimizers, self._whole.runtime)
        load_sync_states(checkpoint, self.optimizers, self._whole.runtime)

    # ---- set-up

    def set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        if not self._alone:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        of(self).rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        _ = self.mesh  # raises here, before any process is started, if the devices do not fit the stages
        self._launcher = None
        if self._launched:
            self._launcher = launcher_for(of(self), self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        module, trainer = self._module_and_trainer()
        check_trainer(trainer)
        fitting = trainer.state.fn == "fit"
        self._written = AsWritten(self.as_written and is_undivided(self._options, self._processes))
        check_steps(
            module, ("training_step", "validation_step") if fitting else (_EVALUATION[trainer.state.fn],), self._written
        )
        if fitting:
            check_module(module, self._written)
        self._checkpoints.await_setup()
        if self._alone and self.cluster_environment is not None:
            self.cluster_environment.validate_settings(num_devices=1, num_nodes=1)
        super().setup_environment()
        local_device(self.local_rank, self.root_device)  # the current one, which not every accelerator sets
        assert self.cluster_environment is not None
        self.set_world_ranks()
        limit_threads(self.num_processes)
        try:
            self._ranks.join(self.cluster_environment, self.root_device, self.num_nodes)
        except BaseException:  # the processes that this one has started would wait for it
            if self._launcher is not None:
                self._launcher.kill(signal.SIGTERM)
            raise

    def setup(self, trainer: Trainer) -> None:
        with guarded(self._ranks.groups):  # if a rank fails alone, the others do not wait for it
            self._set_up(trainer)

    def _set_up(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module, _ = self._module_and_trainer()
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        self._seed = self.broadcast(torch.initial_seed())
        if fitting:
            self.step_times = []
        self._patches.undo()  # those of a run that has ended without a teardown
        connect_callbacks(trainer, self._patches, self._ranks.gather)
        refuse_shards_by_rank(self.cluster_environment, self.mesh.stages, self._patches)
        self._whole.enter(module, fitting)
        self._late = False
        if self._whole.runtime is None:
            self._steps = None  # releases the runtime of an earlier run
            check_can_be_filled(module)
            match_device(self.precision_plugin, self.root_device)
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
            self._ranks.share_weights(module)
            self._late = self._written.possible and not (
                self._large or empty_names(module) or self._checkpoints.waits_for_shards
            )
            if not self._late:
                self._written.refuse()
                self._plan_at_set_up(trainer, "training_step" if fitting else _EVALUATION[trainer.state.fn])
        if self._steps is not None:
            self._steps.start(self.step_times, self._seed)
        if fitting:
            self.account, self._clock = None, StepClock(trainer, self._patches, self.step_times)
        self._checkpoints.load_waiting(module, self._whole.runtime)
        self._signals = Signals(trainer, self._ranks.groups, self._patches, lambda: self._whole.in_step)
        if fitting:
            allow_skipped_batches(trainer, self.mesh, self._patches)
            with counted_by_replicas(trainer, self.data_mesh):
                self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self.precision_plugin, module.automatic_optimization)
            if trainer.checkpoint_callbacks:
                self._checkpoints.prepare()
        self.setup_precision_plugin()
        self._scaling = LossScaling(self.precision_plugin, self._ranks.groups, self.root_device, self._patches)
        connect_clipping(self.precision_plugin, lambda: self._whole.runtime, self._patches)
        if self._steps is not None:
            self._follow_hooks(trainer, module)

    def model_to_device(self) -> None:
        assert self.model is not None
        self._large = too_large(self.model, self._ranks)
        if not self._large:
            move_to_device(self.model, self.root_device)

    def _build(self, trainer: Trainer, module: LightningModule, step: str, example: Any, loader: int | None) -> None:
        """Record the step on a batch, agree on a plan, and keep this rank's stage."""
        context, precision = self.precision_plugin.forward_context, str(trainer.precision)
        job = Job(
            module, self._options, self.mesh, self._ranks.groups, self.root_device, context=context, precision=precision
        )
        with only_shapes(module, self._large) as values:
            self._steps = steps = RecordedSteps(job, module, self._written.possible, self._has_optimizers)
            built = steps.build(step, example, loader)
        if built.runtime.parameters.borrowed is not None:  # by sync="auto", too
            check_borrowing(trainer, module)
        self._whole.runtime = built.runtime
        if values is not None:
            values.give_back(built.runtime)
            move_to_device(module, self.root_device)
        elif steps.empty:
            seed = self.broadcast(torch.initial_seed())
            fill_stage(built.runtime, seed, self._ranks.gather, from_checkpoint=trainer.ckpt_path is not None)
        self._whole.connect()
        built.runtime.tracing.numbers = _TRACED
        self.rehearsed, self._plan = None, None
        if step == "training_step":  # the rehearsal of a plan from a file may have run on another machine
            self.rehearsed = steps.rehearse(example, steps_ahead(trainer))
            self._plan = replace(self.runtime.plan, rehearsed=self.rehearsed)
        notes = f"{self._ranks.describe_nodes(self.node_rank)}{steps.describe(step, built)}{self._compiled(module)}"
        tell(f"pipepart: {type(module).__name__}.{step}\n{self.plan.describe()}{notes}\n")

    def _follow_hooks(self, trainer: Trainer, module: LightningModule) -> None:
        follow_updates(trainer, module, self.runtime, self._patches)
        if self._large or not self._recorded.empty:  # otherwise the model fits on no rank
            follow_hooks(trainer, module, self.runtime, self._patches)

    # ---- steps

    def training_step(self, *args: Any) -> Any:
        """Forward and backward of all micro-batches. The new gradients are kept apart until `backward` is called."""

        def recorded(batch: Any, batch_idx: int = 0, *more: Any) -> Any:
            steps = self._planned_with("training_step", batch)
            return steps.train(batch, batch_idx, 1.0 if self._scaling is None else self._scaling.factor())

        return self._recorded_or("training_step", recorded, super().training_step, args)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hand over the gradients where Lightning expects them. The backward itself has run in the schedule."""
        if "training_step" in self._written.steps:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module, trainer = self._module_and_trainer()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        hand_over_by_backward(trainer, module, closure_loss, self.runtime)
        show_gradients(trainer, self.runtime)
        return self.precision_plugin.post_backward(closure_loss, module)

    def validation_step(self, *args: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, args)

    def test_step(self, *args: Any) -> Any:
        return self._evaluate("test_step", super().test_step, args)

    def predict_step(self, *args: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, args)

    def _evaluate(self, step: str, written: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        def recorded(batch: Any, batch_idx: int = 0, dataloader_idx: int | None = None) -> Any:
            steps = self._planned_with(step, batch, dataloader_idx)
            return steps.evaluate(step, batch, batch_idx, dataloader_idx)

        answer = self._recorded_or(step, recorded, written, args)
        if self._signals is not None:
            self._signals.agree(step, self._steps.ahead if self._steps is not None else 0)
        return answer

    def _module_and_trainer(self) -> tuple[LightningModule, Trainer]:
        assert self.lightning_module is not None
        return self.lightning_module, self.lightning_module.trainer

    # ---- start and end of a run

    def on_train_start(self) -> None:
        """Start the loader again, which planning has opened early. So it draws the same numbers as on one device."""
        if self._opened:
            self._opened = False
            reopen(self._module_and_trainer()[1])

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._whole.runtime is not None and "training_step" not in self._written.steps:
            tell(measured_against_predicted(self.plan, self.step_times))
            self.account = self._clock.account(self.plan, self.runtime) if self.is_global_zero and self._clock else None
            tell(said(self.account))

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if (
            isinstance(exception, of(self).SIGTERMException)
            and self._signals is not None
            and (self._whole.runtime is not None or self._written.steps)
        ):
            self._signals.save()
        self._ranks.tell(exception)
        self._whole.vote(f"failed: {type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """End a run. The base class would move the module to the CPU, which parameters of other stages do not support."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self._patches.undo()
        self._ranks.leave()
        if self.lightning_module is not None and self._whole.runtime is not None:
            self._whole.leave(self.lightning_module, self.optimizers, self._recorded.empty and not self._large)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
