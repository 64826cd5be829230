"""Runs in which replicas divide the updates (`sync="sharded"`, `"fsdp"`, `"master"`).

Each replica has the gradients of what it updates only.

Hooks that read gradients between the backward and the update get those of all parameters of a stage, as with `sync="mean"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pipepart.errors import ConfigError
from pipepart.lightning.hook_rules import of_library
from pipepart.lightning.namespaces import overridden
from pipepart.lightning.run_patches import RunPatches
from pipepart.runtime import StageRuntime

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["check_borrowing", "follow_updates", "show_gradients"]

_READ = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks between the backward and the update."""
_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging", "WeightEMA")


def check_borrowing(trainer: Trainer, module: LightningModule) -> None:
    """Refuse what reads parameters where replicas keep only their shares of them (`sync="fsdp"`)."""
    instead = "Use sync='sharded', which divides gradients and optimizer states."
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if {kind.__name__ for kind in type(callback).__mro__} & set(_AVERAGES):
            raise ConfigError(
                f"{type(callback).__name__} averages all parameters of a stage after each update, and with sync='fsdp' a rank "
                f"keeps its share of them only. {instead}"
            )
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization=False), which is not supported with "
            f"sync='fsdp'. {instead}"
        )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ConfigError(f"sync_batchnorm=True is not supported with sync='fsdp'. {instead}")


def follow_updates(trainer: Trainer, module: LightningModule, runtime: StageRuntime, patches: RunPatches) -> None:
    """Let steps of optimizers be followed by what replicas exchange, until the patches are undone."""
    parameters = runtime.parameters
    if not parameters.divides_updates and parameters.loose is None:
        return
    patches.put(parameters, "follows_optimizers", True)
    if parameters.divides_updates and any(_readers(trainer, module)):
        plugin = trainer.precision_plugin
        patches.put(parameters, "shows_gradients", True)
        patches.put(plugin, "_after_closure", _hiding(plugin._after_closure, runtime))


def _readers(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    """The hooks of the user's program that may read gradients."""
    for name in _READ:
        if overridden(name, module, "LightningModule"):
            yield name
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            function = getattr(callback, name, None)
            if callable(function) and not of_library(function):
                yield name


def show_gradients(trainer: Trainer, runtime: StageRuntime) -> None:
    """Give hooks the gradients that were reduced in this step, if any of them may read gradients. Every rank must call it."""
    if runtime.parameters.shows_gradients and not trainer.fit_loop._should_accumulate():
        runtime.parameters.show_gradients()


def _hiding(original: Callable[..., Any], runtime: StageRuntime) -> Callable[..., Any]:
    """The last call before an update, which then lets go of gradients that this rank does not use."""

    def after_closure(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        runtime.parameters.hide_gradients()
        return result

    return after_closure
