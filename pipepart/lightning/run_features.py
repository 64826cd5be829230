"""Features of a Trainer that need more than a stage: compiled modules, averages of weights, LBFGS, batch norm over replicas.

A strategy inherits them, and its context for modules. Each is connected where Lightning calls the strategy in any run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import LBFGS

from pipepart.errors import ConfigError
from pipepart.lightning.averages import Average, connect_averages
from pipepart.lightning.lbfgs import connect_lbfgs, connect_lbfgs_late
from pipepart.lightning.ranks import Ranks
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.lightning.wholeness import Wholeness

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ParallelStrategy
else:
    ParallelStrategy = object  # comes after this class among the bases of a strategy

__all__ = ["RunFeatures", "compiled_parts"]

_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""The methods that Lightning replaces in a LightningModule that was given to ``torch.compile``."""


class RunFeatures(ParallelStrategy):
    """The part of a strategy that connects these features."""

    _options: StrategyOptions
    _ranks: Ranks
    _whole: Wholeness
    _layer_sync: Any
    sharded: bool
    _averages: tuple[Average, ...] = ()
    _was_compiled = False
    _has_optimizers = False
    """Whether the optimizers of this run are made. Those of the run before may still be there."""

    @property  # type: ignore[override]
    def _lightning_module(self) -> Any:
        return self.__dict__.get("_lightning_module")

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        """Take a module. Lightning asks only afterwards whether the strategy takes compiled ones."""
        self._was_compiled = _as_written(module) or (self._was_compiled and module is self._lightning_module)
        self.__dict__["_lightning_module"] = module

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """`trainer.init_module(empty_init=True)` builds on the meta device. Each rank fills its part after planning."""
        with torch.device("meta") if empty_init else self.root_device, self.precision_plugin.tensor_init_context():
            yield

    def setup_environment(self) -> None:
        """Before callbacks are set up and restored."""
        self._has_optimizers = False
        for average in self._averages:  # of a run that has ended without a teardown
            average.release()
        module = self._lightning_module
        self._averages = connect_averages(module.trainer) if module is not None else ()
        super().setup_environment()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """After the module was cut into stages, if there is a plan."""
        super().setup_optimizers(trainer)
        self._has_optimizers = True
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            if not self._lightning_module.automatic_optimization:
                raise ConfigError(
                    "LBFGS evaluates its closure several times in one step, and a step with manual optimization is recorded "
                    "once: use automatic optimization, or another optimizer."
                )
            if self.sharded:
                raise ConfigError(
                    "the state of LBFGS is one vector over all parameters: use sharded=False, or another optimizer."
                )
            if self._ranks.mesh.replicas > 1:
                raise ConfigError(
                    "LBFGS decides by the loss, and each replica has the loss of its own batch, so they would take different "
                    f"steps: use one replica (stages={self._ranks.mesh.world_size}), or another optimizer."
                )
        if self._whole.runtime is not None:
            connect_lbfgs(self.optimizers, self._whole.runtime)

    def _connect_late_plan(self) -> None:
        """Connect the features of a run that was planned after its set-up. All ranks must call it together."""
        runtime = self._whole.runtime
        assert runtime is not None
        if self._has_optimizers:
            connect_lbfgs_late(self.optimizers, runtime)
        self._share_batch_statistics()

    def setup_precision_plugin(self) -> None:
        """At the end of set-up."""
        super().setup_precision_plugin()
        self._share_batch_statistics()

    def _share_batch_statistics(self) -> None:
        if self._layer_sync is not None and self._whole.runtime is not None:  # sync_batchnorm=True
            self._whole.runtime.share_batch_statistics()

    def _compiled(self, module: nn.Module) -> str:
        """A line on the compiled parts of a module; empty if there are none."""
        parts = ["the LightningModule"] if self._was_compiled else compiled_parts(module)
        if not parts:
            return ""
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        how = "the chunks of a stage are compiled" if self._options.compile else "stages run them without the compiler"
        named = ", ".join(parts[:3])
        return f"\nnote       compiled by torch.compile: {named}{more}. They are recorded as what they wrap, and {how}"


def _as_written(module: Any) -> bool:
    """Give a compiled LightningModule its own methods back. Returns whether it was compiled."""
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return False
    for name in _STEPS:
        method = context[f"original_{name}"]
        if getattr(method, "__func__", None) is getattr(type(module), name, None):
            module.__dict__.pop(name, None)
        else:  # the user has set it on the object
            setattr(module, name, method)
    module._compiler_ctx = None
    return True


def compiled_parts(module: nn.Module) -> list[str]:
    """The paths of modules that ``torch.compile`` or ``Module.compile`` has compiled."""
    found = []
    for path, part in module.named_modules():
        compiled = getattr(part, "_compiled_call_impl", None) is not None
        if compiled or (hasattr(part, "_orig_mod") and type(part).__name__ == "OptimizedModule"):
            found.append(path or type(part).__name__)
    return found
