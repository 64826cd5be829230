"""Callbacks of Lightning that average weights: `WeightAveraging`, `EMAWeightAveraging`, `StochasticWeightAveraging`.

They copy the module before a run. Here the copy is cut as the module is: each stage averages and exchanges the parameters and
buffers that it holds. Checkpoints hold whole averages by full name, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipepart.devices import move_module
from pipepart.errors import ConfigError
from pipepart.lightning.optimizers import gather_parts
from pipepart.lightning.run_patches import RunPatches
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.foreign import ForeignTensor, Place, become, fill_in
from pipepart.runtime.meeting import gather_objects, meet
from pipepart.runtime.transport import broadcast

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["Average", "check_average", "connect_averages"]


def _is_lightnings(callback: Any, name: str) -> bool:
    """Whether a callback is of this class of Lightning, or of a class derived from it."""
    homes = ("lightning.", "pytorch_lightning.")
    return any(kind.__name__ == name and kind.__module__.startswith(homes) for kind in type(callback).__mro__)


def check_average(callback: Any, strategy: Any) -> None:
    """Refuse averages of weights that stages cannot keep by themselves."""
    name, steps = type(callback).__name__, _is_lightnings(callback, "WeightAveraging")
    if not steps and not _is_lightnings(callback, "StochasticWeightAveraging"):
        return
    if strategy.after == "parts":
        raise ConfigError(f"{name} averages the whole module: use after='whole', or pipepart.WeightEMA.")
    if not steps:
        return
    if strategy.sharded:
        raise ConfigError(
            f"{name} writes its averages in the place of the weights, which sharded checkpoints do not support. Use "
            "sharded=False, or pipepart.WeightEMA."
        )
    function = callback._kwargs.get("multi_avg_fn")
    if function is not None and getattr(function, "__module__", "") != "torch.optim.swa_utils":
        raise ConfigError(
            f"{name} has a multi_avg_fn of its own, which would see the parameters of one stage only. Use avg_fn, which gets "
            "one parameter at a time, or a function of torch.optim.swa_utils."
        )


def connect_averages(trainer: Trainer) -> tuple[Average, ...]:
    """Let the callbacks of this trainer that average weights work on the parts of this rank, for one run."""
    found: list[Average] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if _is_lightnings(callback, "WeightAveraging"):
            found.append(_OfSteps(callback, trainer))
        elif _is_lightnings(callback, "StochasticWeightAveraging"):
            found.append(_OfEpochs(callback, trainer))
    return tuple(found)


class Average:
    """The average of one callback: a copy of the module that is whole between runs, and cut during a run."""

    exchanges: tuple[str, ...]
    """The methods of the callback that go through the parameters of the module and of its copy."""

    def __init__(self, callback: Any, trainer: Trainer) -> None:
        self.callback, self.trainer = callback, trainer
        self._patches = RunPatches()
        self._cut: tuple[nn.Module, StageRuntime] | None = None
        for name in ("setup", "on_fit_start", "teardown"):
            self.wrap(name, getattr(self, name))
        for name in self.exchanges:
            self.wrap(name, self.exchange)

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Let a method of the callback call `around` with the original first, until `release`."""
        self._patches.put(self.callback, name, _around(getattr(self.callback, name), around))

    def release(self) -> None:
        """Give the callback its own methods back."""
        self._patches.undo()

    @property
    def copy(self) -> nn.Module | None:
        """The copy of the LightningModule."""
        raise NotImplementedError

    def setup(self, original: Callable[..., None], trainer: Trainer, module: LightningModule, **stage: str) -> None:
        try:
            original(trainer, module, **stage)
        except NotImplementedError as error:
            if not any(parameter.is_meta for parameter in module.parameters()):
                raise
            raise ConfigError(
                f"{type(self.callback).__name__} copies {type(module).__name__}, which was built on the meta device and has no "
                "values yet. Use pipepart.WeightEMA, which averages the values of each stage, or build the module with values."
            ) from error

    def on_fit_start(self, original: Callable[..., None], *args: Any) -> None:
        self.cut()
        original(*args)

    def exchange(self, original: Callable[..., Any], *args: Any) -> Any:
        self.cut()
        with self._held():
            return original(*args)

    def teardown(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self.make_whole()
        self.release()

    # ---- cut and whole

    def cut(self) -> None:
        """Drop the averages of other stages. A copy that is in parts stays as it is."""
        copy, runtime = self.copy, self._runtime()
        if copy is None or runtime is None or runtime.groups is None or runtime.parts.whole or self._cut is not None:
            return
        if [name for name, _ in copy.named_parameters()] != [name for name, _ in runtime.root.named_parameters()]:
            raise ConfigError(
                f"{type(self.callback).__name__} has copied {type(runtime.root).__name__} before all its parameters existed. "
                "Create them in __init__ instead of setup() or configure_model(), or use pipepart.WeightEMA."
            )
        with (
            guarded(runtime.groups),
            torch.no_grad(),
        ):  # seeds of ranks may differ, and each rank has copied its own module
            meet(runtime.groups)
            for tensor in (*copy.parameters(), *copy.buffers()):
                broadcast(tensor.data, 0, runtime.groups.world)
        held = set(runtime.ownership.held_by(runtime.stage))
        for name, parameter in copy.named_parameters():
            if name not in held:
                stage = runtime.ownership.parameters[name][0]
                become(parameter, Place(f"average of {name}", "parameter", stage, runtime.groups.rank_of_stage(stage)))
        self._cut = copy, runtime
        copy.__dict__["state_dict"] = self._state
        copy.__dict__["load_state_dict"] = lambda state, strict=True, assign=False: _load(copy, state, strict)
        copy.__dict__["to"] = lambda device: _moved(copy, device)

    def _runtime(self) -> StageRuntime | None:
        runtime: StageRuntime | None = self.trainer.strategy._whole.runtime  # type: ignore[attr-defined]
        return runtime

    def make_whole(self) -> None:
        """Gather the averages of all stages on every rank. Every rank must call it."""
        if self._cut is None:
            return
        (copy, runtime), self._cut = self._cut, None
        for name in ("state_dict", "load_state_dict", "to"):
            copy.__dict__.pop(name, None)
        groups = runtime.groups
        assert groups is not None
        with guarded(groups), torch.no_grad():
            buffers = {
                name: b for name, b in copy.named_buffers() if runtime.ownership.buffers.get(name) == runtime.stage
            }
            parts = gather_objects({name: b.cpu() for name, b in buffers.items()}, groups, inside_replica=True)
            for name, parameter in copy.named_parameters():
                here = not isinstance(parameter, ForeignTensor)
                device = runtime.device if not here else parameter.device
                values = (parameter.data if here else torch.empty_like(parameter, device=device)).to(runtime.device)
                broadcast(values, groups.rank_of_stage(runtime.ownership.parameters[name][0]), groups.pipeline)
                if not here:
                    fill_in(parameter, values.cpu())
        others = {name: value for part in parts for name, value in part.items() if name not in buffers}
        for name, buffer in copy.named_buffers():
            if name in others:
                buffer.copy_(others[name])

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Inside, module and copy list the parameters and buffers of this stage only."""
        if self._cut is None:
            yield
            return
        copy, runtime = self._cut
        names = set(runtime.ownership.held_by(runtime.stage)), runtime.held_buffers
        with ExitStack() as stack:
            stack.enter_context(_listing(runtime.root, runtime.root, names))
            for owner in (copy, *self.around()):
                stack.enter_context(_listing(owner, copy, names))
            yield

    def around(self) -> tuple[nn.Module, ...]:
        """Modules around the copy whose parameters are those of the copy."""
        return ()

    # ---- checkpoints

    def _state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The whole average by full name on rank 0; the part of this rank elsewhere. Every rank must call it."""
        assert self._cut is not None
        copy, runtime = self._cut
        own: dict[str, Any] = type(copy).state_dict(copy, *args, **kwargs)
        prefix = kwargs.get("prefix", "")  # of a module around the copy, whose entries may be in `own` too
        bare = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        merged = gather_parts(runtime.parts.homed_here(bare), runtime) or {}
        own.update({prefix + name: merged[name] for name in bare if name in merged})
        return own


class _OfSteps(Average):
    """`WeightAveraging` and classes derived from it, which average after steps and evaluate with the average."""

    exchanges = ("_swap_models", "_copy_average_to_current")

    def __init__(self, callback: Any, trainer: Trainer) -> None:
        super().__init__(callback, trainer)
        self.wrap("on_load_checkpoint", self.on_load_checkpoint)

    @property
    def copy(self) -> nn.Module | None:
        average = self.callback._average_model
        return None if average is None else average.module

    def around(self) -> tuple[nn.Module, ...]:
        return (self.callback._average_model,)

    def cut(self) -> None:
        before = self._cut
        super().cut()
        average = self.callback._average_model
        if self._cut is not None and before is None:
            average.__dict__["update_parameters"] = _around(average.update_parameters, self.update)

    def update(self, original: Callable[..., None], module: LightningModule) -> None:
        assert self._cut is not None
        (copy, runtime), average = self._cut, self.callback._average_model
        own = dict(copy.named_buffers())
        buffers = {name: b for name, b in module.named_buffers() if name in runtime.held_buffers and name in own}
        if runtime.ownership.held_by(runtime.stage) or (average.use_buffers and buffers):
            self.exchange(original, module)
            return
        for name, buffer in buffers.items():  # torch does not average empty lists
            own[name].detach().copy_(buffer.detach())
        average.n_averaged += 1

    def make_whole(self) -> None:
        super().make_whole()
        if self._cut is None and self.callback._average_model is not None:
            self.callback._average_model.__dict__.pop("update_parameters", None)

    def on_load_checkpoint(
        self, original: Callable[..., None], trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load averages, and weights in their place. The checkpoint has averages in the place of the weights."""
        average = self.callback._average_model
        self.cut()
        if self._cut is None:
            original(trainer, module, checkpoint)
        else:
            loads = {
                module: lambda state, strict=True, assign=False: _load(module, state, strict),
                average: lambda state, strict=True, assign=False: _load(average, state, strict),
            }
            for owner, load in loads.items():
                owner.__dict__["load_state_dict"] = load
            try:
                original(trainer, module, checkpoint)
            finally:
                for owner in loads:
                    del owner.__dict__["load_state_dict"]
        if average is not None and "current_model_state" in checkpoint:
            checkpoint["state_dict"] = checkpoint["current_model_state"]  # if weights are loaded after callbacks


class _OfEpochs(Average):
    """`StochasticWeightAveraging`, which averages after epochs and computes batch statistics in one more epoch."""

    exchanges = ("update_parameters", "transfer_weights")

    def __init__(self, callback: Any, trainer: Trainer) -> None:
        super().__init__(callback, trainer)
        self.wrap("load_state_dict", self.load_state_dict)

    @property
    def copy(self) -> nn.Module | None:
        copy: nn.Module | None = self.callback._average_model
        return copy

    def load_state_dict(self, original: Callable[..., None], state: dict[str, Any]) -> None:
        self.cut()
        original(state)
        if self.callback._scheduler_state is not None:  # its scheduler takes the place of the trainer's
            self.callback._clear_schedulers(self.trainer)


def _around(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `around` with the original first."""
    return lambda *args, **kwargs: around(original, *args, **kwargs)


@contextmanager
def _listing(owner: nn.Module, module: nn.Module, held: tuple[set[str], frozenset[str]]) -> Iterator[None]:
    """Inside, `owner` lists the parameters and buffers of `module` with the held names, in the usual order."""
    parameters = [p for name, p in module.named_parameters() if name in held[0]]
    buffers = [b for name, b in module.named_buffers() if name in held[1]]
    owner.__dict__.update(parameters=lambda recurse=True: iter(parameters), buffers=lambda recurse=True: iter(buffers))
    try:
        yield
    finally:
        del owner.__dict__["parameters"], owner.__dict__["buffers"]


def _load(module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    """Load the part of this rank from the state dict of a whole module."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    elsewhere = {name for name, tensor in tensors if isinstance(tensor, ForeignTensor)}
    part = {name: value for name, value in state.items() if name not in elsewhere}
    result = type(module).load_state_dict(module, part, strict=False)
    missing = [name for name in result.missing_keys if name not in elsewhere]
    missing += [name for name in elsewhere if name not in state]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"the state dict does not fit {type(module).__name__}: missing {sorted(missing)}, unexpected "
            f"{sorted(result.unexpected_keys)}. Load a state dict of this model, or use strict=False."
        )
    return result


def _moved(module: nn.Module, device: Any) -> nn.Module:
    own = module.__dict__.pop("to")  # the module of a stage that holds everything is moved as usual
    try:
        move_module(module, torch.device(device))
    finally:
        module.__dict__["to"] = own
    return module
