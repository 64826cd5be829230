"""Pipeline parallelism as a Lightning strategy: speaks Lightning, delegates the work to the runtime."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _init_dist_connection, _sync_ddp_if_available
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer

from pipepart.capture import Recording, record_step
from pipepart.errors import PlanError
from pipepart.planning import Plan, check_request
from pipepart.runtime import Groups, Mesh, Options, StageRuntime, agree_on_plan, example_microbatch, fit_mesh
from pipepart.runtime.device import backend_for, limit_threads
from pipepart.runtime.failure import guarded
from pipepart.runtime.program import StepResult
from pipepart.strategy.console import tell
from pipepart.strategy.example import first_batch, open_loader
from pipepart.strategy.optimizers import full_optimizer_state, load_full_optimizer_state
from pipepart.strategy.refusals import check_module, check_optimizers

__all__ = ["PipelineStrategy"]

_EVALUATION = {
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class PipelineStrategy(ParallelStrategy):
    """Train an unmodified LightningModule as `replicas` pipelines of `stages` stages.

    ```python
    trainer = L.Trainer(strategy=PipelineStrategy(stages=4, microbatches=16), devices=8)   # 2 replicas x 4 stages
    ```

    The whole `training_step` is recorded on the first batch, cut into stages by measured cost, and run on micro-batches.
    `plan` takes a plan that was saved. `example_batch` is for data that can be read only once.
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
        timeout: float = 300.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        check_request(schedule, microbatches, stages)
        loaded = Plan.load(plan) if isinstance(plan, str) else plan
        self._options = Options(
            loaded.stages if loaded else stages, loaded.replicas if loaded else replicas, microbatches, schedule, chunks,
            slack, keep_together, split_at, loaded, timeout,
        )
        self._example_batch = example_batch
        self._num_nodes = 1
        self._mesh: Mesh | None = None
        self._groups: Groups | None = None
        self._runtime: StageRuntime | None = None
        self.step_times: list[float] = []
        """Seconds of each training step on this rank, without the optimizer."""

    # ---- who is where

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            devices = self.num_nodes * self.num_processes
            self._mesh = fit_mesh(devices, self._options.stages, self._options.replicas)
        return self._mesh

    @property
    def runtime(self) -> StageRuntime:
        if self._runtime is None:
            raise PlanError("the pipeline is not set up yet: it is planned when the trainer starts, on its first batch")
        return self._runtime

    @property
    def plan(self) -> Plan:
        return self.runtime.plan

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def is_distributed(self) -> bool:
        """For Lightning: whether data is divided among ranks. The stages of one replica work on the same data."""
        return self.mesh.replicas > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.replicas, "rank": self.mesh.replica_of(self.global_rank)}

    def set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        _ = self.mesh  # devices that do not fit the stages are an error here, before any process is started
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    # ---- setting up

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        limit_threads(self.num_processes)
        timeout = timedelta(seconds=self._options.timeout)
        _init_dist_connection(self.cluster_environment, backend_for(self.root_device), timeout=timeout)
        if self._groups is None and self.mesh.world_size > 1:
            self._groups = Groups.create(self.mesh, timeout)

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            check_module(module, trainer)
        self._release_other_model(module, fitting)
        if self._runtime is None:
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
            self._build(trainer, module, "training_step" if fitting else _EVALUATION[trainer.state.fn])
        if fitting:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    def _release_other_model(self, module: LightningModule, fitting: bool) -> None:
        """A runtime of another model, or one that was planned for evaluation alone, gives way to a new one."""
        runtime = self._runtime
        if runtime is None or (runtime.root is module and (runtime.has("training_step") or not fitting)):
            return
        runtime.make_whole()
        self._runtime = None

    def _build(self, trainer: Trainer, module: LightningModule, step: str) -> None:
        """Record the step on the first batch, agree on a plan, keep this rank's stage."""
        with guarded(self._groups):
            _same_weights_everywhere(module, self._groups)
            example = self._shared_example(trainer)
        microbatch, count = example_microbatch(example, self._options, self.mesh)
        module.train(step == "training_step")
        recording = self._record(module, step, microbatch)
        leaves = recording.flatten((microbatch,), {})
        plan, graph = agree_on_plan(
            recording, leaves, self._options, self.mesh, count, self._groups,
            self.precision_plugin.forward_context, str(trainer.precision),
        )
        self._runtime = StageRuntime(
            module, plan, graph, recording, self._groups, self.root_device, self._options.timeout, step
        )
        module.train()
        tell(f"pipepart: {type(module).__name__}.{step}\n{plan.describe()}\n")

    def _shared_example(self, trainer: Trainer) -> Any:
        """The example of rank 0 for all: ranks must record the same."""
        box = [self._example_batch]
        if self._example_batch is None:
            loader = open_loader(trainer)
            if self.global_rank == 0:
                box = [first_batch(trainer, loader)]
        if self._groups is not None:
            dist.broadcast_object_list(box, 0)
        return self.batch_to_device(box[0]) if self._example_batch is not None or self.global_rank else box[0]

    def _record(self, module: LightningModule, step: str, batch: Any, dataloader_idx: int | None = None) -> Recording:
        with self.precision_plugin.forward_context(), torch.set_grad_enabled(step == "training_step"):
            return record_step(module, step, batch, dataloader_idx=dataloader_idx)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # ---- steps

    def training_step(self, batch: Any, batch_idx: int = 0, *args: Any) -> Any:
        """All micro-batches, forward and backward; the new gradients wait until `backward` is called."""
        module, trainer = self._module_and_trainer()
        started = time.perf_counter()
        result = self.runtime.train(
            self._leaves("training_step", batch, batch_idx, None),
            loss_scale=1.0 / trainer.accumulate_grad_batches,
            trace=len(self.step_times) in (3, 10),
            context=self.precision_plugin.forward_context,
        )
        self.step_times.append(time.perf_counter() - started)
        self._replay_logs("training_step", result)
        return self.runtime.recording("training_step").unflatten(result.outputs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The backward has run in the schedule: hand its gradients over where Lightning expects them to appear."""
        module, _ = self._module_and_trainer()
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.runtime.hand_over()
        return self.precision_plugin.post_backward(closure_loss, module)

    def validation_step(self, *args: Any) -> Any:
        return self._evaluate("validation_step", *args)

    def test_step(self, *args: Any) -> Any:
        return self._evaluate("test_step", *args)

    def predict_step(self, *args: Any) -> Any:
        return self._evaluate("predict_step", *args)

    def _evaluate(self, step: str, batch: Any, batch_idx: int = 0, dataloader_idx: int | None = None) -> Any:
        name = step if dataloader_idx is None else f"{step}:{dataloader_idx}"
        if not self.runtime.has(name):
            self._add_evaluation(name, step, batch, dataloader_idx)
        result = self.runtime.evaluate(
            name, self._leaves(name, batch, batch_idx, dataloader_idx), context=self.precision_plugin.forward_context
        )
        self._replay_logs(name, result)
        return self.runtime.recording(name).unflatten(result.outputs)

    def _add_evaluation(self, name: str, step: str, batch: Any, dataloader_idx: int | None) -> None:
        """Record an evaluation step the first time it runs, on the batch of the first stage of replica 0."""
        module, _ = self._module_and_trainer()
        with guarded(self._groups):
            box = [batch]
            if self._groups is not None:
                dist.broadcast_object_list(box, 0)
        leaves, tree = pytree.tree_flatten(self.batch_to_device(box[0]) if self.global_rank else box[0])
        with self.runtime.gathered():
            self.runtime.add(name, self._record(module, step, pytree.tree_unflatten(leaves, tree), dataloader_idx))

    def _leaves(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> list[Any] | None:
        if not self.runtime.is_first:
            return None
        _, trainer = self._module_and_trainer()
        known = {
            "batch_idx": batch_idx,
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "dataloader_idx": dataloader_idx or 0,
        }
        recording = self.runtime.recording(name)
        wanted = {item.name for item in recording.inputs if item.kind == "number"}
        with guarded(self._groups):
            return recording.flatten((batch,), {key: value for key, value in known.items() if key in wanted})

    def _replay_logs(self, name: str, result: StepResult) -> None:
        """What the step logged, as means over the micro-batches, logged on every rank: monitors see the same everywhere."""
        module, _ = self._module_and_trainer()
        for call in self.runtime.recording(name).logs:
            value = call.constant if call.output is None else result.outputs[call.output]
            options: dict[str, Any] = {"batch_size": result.sizes.batch_size, **call.options}
            module.log(call.name, value, **options)

    def _module_and_trainer(self) -> tuple[LightningModule, Trainer]:
        assert self.lightning_module is not None
        return self.lightning_module, self.lightning_module.trainer

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.runtime.clip_grad_norm(list(self.precision_plugin.main_params(optimizer)), clip_val)

    # ---- collectives

    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            with guarded(self._groups):
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        with guarded(self._groups):
            dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the replicas: the stages of one replica have the same values."""
        if not isinstance(tensor, torch.Tensor) or self._groups is None or self._groups.copies is None:
            return tensor
        return _sync_ddp_if_available(tensor, group or self._groups.copies, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks: stages may see different things (time, signals)."""
        if not _distributed_is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        with guarded(self._groups):
            dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    # ---- checkpoints: one plain file, as one device would write it

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.runtime.full_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.runtime.load_full_state_dict(dict(checkpoint["state_dict"]), strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return full_optimizer_state(plain, self.runtime)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            load_full_optimizer_state(optimizer, state)

    def teardown(self) -> None:
        """Not the base class's: that one moves the module to the CPU, which parameters of other stages cannot."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _same_weights_everywhere(module: LightningModule, groups: Groups | None) -> None:
    """Rank 0's weights and buffers for all, so that it does not matter how each rank has seeded."""
    if groups is None:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, 0)
