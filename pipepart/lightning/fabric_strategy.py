"""The strategy under Fabric: its interface is that of Fabric's strategies; `fabric_steps` has the steps.

`Fabric(strategy=PipelineStrategy(...))` binds the strategy to these methods (`binding`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from pipepart.build import Job
from pipepart.devices import limit_threads, local_device
from pipepart.errors import ConfigError, PlanError
from pipepart.lightning.fabric_checkpoints import FabricCheckpoints
from pipepart.lightning.fabric_steps import FunctionSteps, Parked, PipelinedModule, StepFunction
from pipepart.lightning.launcher import launcher_for
from pipepart.lightning.materialise import empty_names
from pipepart.lightning.namespaces import of
from pipepart.lightning.random_states import isolate_rng
from pipepart.lightning.ranks import RankCollectives
from pipepart.lightning.refusals import check_optimizers
from pipepart.lightning.run_patches import RunPatches
from pipepart.lightning.wholeness import move_to_device
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded

if TYPE_CHECKING:
    from pipepart.lightning.pipeline_strategy import PipelineStrategy as _Base
else:
    _Base = object

__all__ = ["FabricMethods"]

_PRECISIONS = ("Precision", "HalfPrecision", "DoublePrecision", "MixedPrecision")


_NOT_IN_A_STEP = {
    "backward": "return the loss, and call fabric.backward(loss) after the step",
    "log_dict": "return the value, and log it after the step (this holds for self.log of a LightningModule, too)",
}
"""Methods of Fabric that a step cannot call, since its Python code is not run again, and what to do instead."""


def _refuse(name: str, instead: str, *args: Any, **kwargs: Any) -> Any:
    raise ConfigError(f"the step calls fabric.{name}. Its code runs only while it is recorded: {instead}.")


class FabricMethods(FabricCheckpoints, _Base):
    """Methods of the strategy that Fabric calls, in the place of those for a Trainer."""

    _num_nodes: int
    _module: PipelinedModule | None
    _functions: FunctionSteps | None

    def begin_fabric(self) -> None:
        """Set the attributes of a strategy that Fabric has connected."""
        self._num_nodes, self._module, self._functions = 1, None, None
        self._names: dict[str, int] = {}
        self._own_optimizers: list[Optimizer] = []
        self._used: list[Parked] | None = None  # the steps of a backward; None outside of one
        self._accumulates = self._has_own = False
        self._backward_sync_control = _NoSync(self)
        options = self._options
        if options.sync_mode.apart:
            raise ConfigError(
                f"sync={options.sync_mode.mode!r} is not supported under Fabric, whose checkpoints have no place for replicas "
                "that make updates of their own. Use it in a Trainer or with pipepart.Pipeline, or use sync='mean'."
            )
        _check_borrowing(options.sync_mode.mode == "fsdp")
        for option, default in (("example_batch", None), ("sharded", False)):
            if getattr(options, option) is not default:
                raise ConfigError(
                    f"{option} is an option for a Trainer. Under Fabric the first call of a step is the example, and "
                    "checkpoints are plain files: leave it out."
                )

    @property
    def runtime(self) -> StageRuntime:
        """The stage of this rank."""
        if self._whole.runtime is None:
            raise PlanError(
                "the pipeline is not set up yet: it is planned at the first call of a step. Call a step first."
            )
        return self._whole.runtime

    # ---- the step

    def step(self, function: Callable[..., Any]) -> StepFunction:
        """Make a step of a function that calls the module of `fabric.setup` and returns a loss, or a dict with `loss`.

        ```python
        @fabric.strategy.step
        def step(x, y):
            return criterion(model(x), y)

        loss = step(x, y)      # forward and backward of all micro-batches
        fabric.backward(loss)  # adds the gradients of this step to `.grad`
        ```

        Inside `with torch.no_grad():` the step is evaluated: it may return anything, and every rank gets it. Every rank must
        make the same calls. Each replica uses the arguments of its first stage.
        """
        name = getattr(function, "__name__", "step")
        self._names[name] = count = self._names.get(name, 0) + 1
        return StepFunction(self._run, function, name if count == 1 else f"{name}-{count}")

    def _run(self, step: StepFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._module is None:
            raise PlanError(f"{step.name} was called before `fabric.setup(model, optimizer)`. Set up the model first.")
        if self._module.recording:  # a step that another step calls
            return step.function(*args, **kwargs)
        functions = self._steps_of(self._module)
        with guarded(self._ranks.groups):
            if not torch.is_grad_enabled():
                return functions.evaluate(step, args, kwargs)
            reduce = self.mesh.replicas == 1 or not self._accumulates
            return functions.train(step, args, kwargs, reduce, self._use)

    def _steps_of(self, module: PipelinedModule) -> FunctionSteps:
        if self._functions is None:
            move_to_device(module.original, self.root_device)
            self._ranks.share_weights(module.original)
            options, groups = self._options, self._ranks.groups
            job = Job(module.original, options, self.mesh, groups, self.root_device, call=True)
            self._functions = FunctionSteps(job, lambda: self._recorded_as_they_are(module), self._planned)
        return self._functions

    def _planned(self, runtime: StageRuntime) -> None:
        """Use a new plan. Every rank calls it. States of optimizers that were loaded before are kept for own parameters."""
        _check_borrowing(runtime.parameters.borrowed is not None)  # by sync="auto", too
        self._whole.runtime = runtime
        runtime.seeds.seed = self.broadcast(torch.initial_seed())
        runtime.parameters.follows_optimizers = True
        others = runtime.parameters.updated_elsewhere
        for optimizer in self._own_optimizers:
            for parameter in [p for p in optimizer.state if isinstance(p, torch.Tensor)]:
                if parameter.is_meta or id(parameter) in others:
                    del optimizer.state[parameter]

    def make_whole(self) -> None:
        """Gather all values on every rank, in host memory, and forget the plan. All ranks must call it together."""
        self._functions = None
        self._whole.make_whole()

    @contextmanager
    def _recorded_as_they_are(self, module: PipelinedModule) -> Iterator[None]:
        """Inside, wrappers of Fabric call their modules with its precision, and add no hooks to results."""
        patches = RunPatches()
        wrapper = of(self).module("fabric.wrappers")._FabricModule

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            precision = self._strategy.precision
            args, kwargs = precision.convert_input((args, kwargs))
            with precision.forward_context():
                output = self._forward_module(*args, **kwargs)
            return precision.convert_output(output)

        patches.put(wrapper, "forward", forward)
        for name, instead in _NOT_IN_A_STEP.items():
            patches.put(of(self).Fabric, name, partial(_refuse, name, instead))
        try:
            with module.open(), isolate_rng():  # random numbers that planning draws do not change those of the program
                yield
        finally:
            patches.undo()

    def _evaluate_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the module itself, or of a method, for a program that calls it inside `torch.no_grad()`.

        The wrapper of Fabric has turned on autocast, which keeps references to parameters. So it is turned on inside.
        """
        precision = self.precision

        def forward(*args: Any, **kwargs: Any) -> Any:
            with precision.forward_context():
                return target(*args, **kwargs)

        kind = self.root_device.type
        mixed = torch.is_autocast_enabled(kind)
        name = getattr(target, "__qualname__", type(target).__name__)
        step = StepFunction(self._run, forward if mixed else target, name)
        with torch.autocast(kind, enabled=False, cache_enabled=False) if mixed else nullcontext():
            return self._run(step, args, kwargs)

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Add the gradients of the steps that `tensor` comes from to `.grad`, times its derivative by their losses."""
        self._used = []
        try:
            super(RankCollectives, self).backward(tensor, module, *args, **kwargs)  # type: ignore[misc]
            used = list(dict.fromkeys(self._used))
        finally:
            self._used = None
        if not used:
            raise ConfigError(
                "fabric.backward got a loss that comes from no step of this pipeline. Hand over the result of a function that "
                "was made with `fabric.strategy.step`."
            )
        for parked in used:
            self._hand_over(parked)

    def _use(self, parked: Parked) -> None:
        """Note a step whose gradients are to be handed over. Its loss calls it in backward."""
        if self._used is None:
            raise ConfigError("loss.backward() was called. Call fabric.backward(loss), which hands over the gradients.")
        if parked.gradients is None:
            raise ConfigError(
                "the gradients of this step were handed over already: call fabric.backward once for the loss of a step."
            )
        self._used.append(parked)

    @torch.no_grad()
    def _hand_over(self, parked: Parked) -> None:
        factor, gradients, parked.gradients = parked.factor, parked.gradients or {}, None
        self._check_equal(factor)
        parameters = self.runtime.named_parameters()
        if parked.reduced and self._has_own:
            self._reduce_own()
        self._has_own = self._has_own or not parked.reduced
        for name, gradient in gradients.items():
            parameter, new = parameters[name], gradient if factor == 1.0 else gradient.mul_(factor)
            parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)

    def _check_equal(self, factor: float) -> None:
        """Refuse derivatives that differ between replicas, whose gradients are combined already."""
        groups = self._ranks.groups
        if groups is None or groups.copies is None:
            return
        found = torch.tensor([factor, -factor], dtype=torch.float64, device=self.root_device)
        with guarded(groups):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=groups.copies)
        if float(found[0]) != -float(found[1]):
            raise ConfigError(
                f"fabric.backward multiplies the loss by different factors on the replicas (here {factor}, at most "
                f"{float(found[0])}). The gradients of replicas are combined in the step: compute the factor inside of it."
            )

    def _reduce_own(self) -> None:
        """Combine the gradients that were accumulated inside `no_backward_sync` over the replicas."""
        parameters, sync = self.runtime.named_parameters(), self.runtime.parameters.sync
        with guarded(self._ranks.groups):
            sync.begin(parameters)
            sync.reduce(parameters)
        self._has_own = False

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if "closure" in kwargs:
            raise ConfigError(
                "optimizer.step(closure) is not supported in a pipeline. Call the step, fabric.backward(loss) and "
                "optimizer.step() one after the other."
            )
        if self._has_own:
            raise ConfigError(
                "optimizer.step() was called after a backward inside `fabric.no_backward_sync`, so the gradients of replicas "
                "differ. Run the last step and its backward before optimizer.step() outside of it (`enabled=False`)."
            )
        return super(RankCollectives, self).optimizer_step(optimizer, **kwargs)  # type: ignore[misc]

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clip by the norm over all stages."""
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"norm_type={norm_type} is not supported in a pipeline: gradients are clipped by the 2-norm."
            )
        norm = self.runtime.clip_grad_norm(list(self.precision.main_params(optimizer)), float(max_norm))
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the norm of the gradients is {float(norm)}, so they cannot be clipped. To clip them anyway, set "
                "error_if_nonfinite=False."
            )
        return norm

    # ---- set-up

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        return super().distributed_sampler_kwargs if self.mesh.replicas > 1 else None

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        _ = self.mesh  # raises here, before any process is started, if the devices do not fit the stages
        given = self.cluster_environment, self.num_processes, self.num_nodes
        self._launcher = launcher_for(of(self), *given, package="fabric") if self._launched or self._alone else None

    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.cluster_environment is not None
        self._check_precision()
        self.accelerator.setup_device(self.root_device)
        local_device(self.local_rank, self.root_device)
        self.set_world_ranks()
        limit_threads(self.num_processes)
        try:
            self._ranks.join(self.cluster_environment, self.root_device, self.num_nodes)
        except BaseException:  # the processes that this one has started would wait for it
            if self._launcher is not None:
                self._launcher.kill(signal.SIGTERM)
            raise

    def _check_precision(self) -> None:
        plugin, home = self.precision, of(self).module("fabric.plugins.precision")
        known = any(type(plugin) is getattr(home, name) for name in _PRECISIONS)
        if not known or getattr(plugin, "scaler", None) is not None:
            raise ConfigError(
                f"the precision {getattr(plugin, 'precision', type(plugin).__name__)!r} is not supported under Fabric in a "
                "pipeline. Use '32-true', 'bf16-mixed', 'bf16-true', '16-true' or '64-true'."
            )

    def module_to_device(self, module: nn.Module) -> None:
        move_to_device(module, self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self._module is not None:
            raise ConfigError(
                "fabric.setup was called for a second model. A pipeline runs one: make both parts of one nn.Module, and set "
                "that one up."
            )
        if names := empty_names(module):
            raise ConfigError(
                f"{len(names)} tensors of {type(module).__name__} are on the meta device, such as {names[0]}. Under Fabric a "
                "model needs its values: call `pipepart.lightning.materialise(model)` before `fabric.setup`."
            )
        self._module = PipelinedModule(module, self._evaluate_module)
        return self._module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, LBFGS):
            raise ConfigError("LBFGS over stages works in a Trainer only: use another optimizer under Fabric.")
        check_optimizers([optimizer], self.precision)
        self._own_optimizers.append(optimizer)
        return optimizer

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        made: AbstractContextManager[Any] = super(RankCollectives, self).tensor_init_context()  # type: ignore[misc]
        return made

    def process_dataloader(self, dataloader: Any) -> Any:
        return self._ranks.loader(dataloader, self._ranks.decide)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return of(self).move_data_to_device(batch, device or self.root_device)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas. The stages of one replica have equal values."""
        return self._ranks.reduce(tensor, group, reduce_op)

    def teardown(self) -> None:
        super(RankCollectives, self).teardown()  # type: ignore[misc]


def _check_borrowing(borrows: bool) -> None:
    """Refuse replicas that keep their shares of parameters only."""
    if borrows:
        raise ConfigError(
            "sync='fsdp' is not supported under Fabric, whose loops may read parameters between two steps. Use it in a Trainer "
            "or with pipepart.Pipeline, or use sync='sharded'."
        )


class _NoSync:
    """`fabric.no_backward_sync`: steps inside do not exchange gradients between replicas."""

    def __init__(self, strategy: FabricMethods) -> None:
        self._strategy = strategy

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Iterator[None]:
        before, self._strategy._accumulates = self._strategy._accumulates, enabled
        try:
            yield
        finally:
            self._strategy._accumulates = before
