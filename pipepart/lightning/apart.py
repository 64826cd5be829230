"""Runs of a Trainer whose replicas make updates of their own (`sync="local"`, `"ring"`): what is evaluated, how they end.

Evaluations of replicas that borrow parameters (`"fsdp"`) begin and end here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipepart.errors import ConfigError
from pipepart.lightning.announce import tell
from pipepart.lightning.divided_updates import check_borrowing
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.lightning.wholeness import Wholeness

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ParallelStrategy

    from pipepart.runtime import Mesh
else:
    ParallelStrategy = object  # comes after this class among the bases of a strategy

__all__ = ["ReplicasApart"]

_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging", "WeightEMA")


class ReplicasApart(ParallelStrategy):
    """The part of a strategy that shows the mean of the replicas, where there has to be one set of parameters."""

    _options: StrategyOptions
    _whole: Wholeness

    if TYPE_CHECKING:

        @property
        def mesh(self) -> Mesh: ...

    def setup_environment(self) -> None:
        module = self.lightning_module
        if module is not None and self._options.sync_mode.apart and self.mesh.replicas > 1:
            _check(module.trainer, self._options.sync_mode.mode)
        if module is not None and self._options.sync_mode.mode == "fsdp" and self.mesh.replicas > 1:
            check_borrowing(module.trainer, module)
        super().setup_environment()

    # ---- points at which replicas wait for each other

    def _settle(self) -> None:
        runtime = self._whole.runtime
        if runtime is not None:
            runtime.parameters.settle()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """After the last update of an epoch, replicas wait for each other: values of the epoch are combined."""
        made = super().optimizer_step(*args, **kwargs)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and (trainer.is_last_batch or 0 <= trainer.max_steps <= trainer.global_step + 1):
            self._settle()
        return made

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return super().broadcast(*args, **kwargs)  # type: ignore[safe-super]

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return super().reduce(*args, **kwargs)  # type: ignore[safe-super]

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return super().all_gather(*args, **kwargs)

    def reduce_boolean_decision(self, *args: Any, **kwargs: Any) -> bool:
        self._settle()
        return super().reduce_boolean_decision(*args, **kwargs)

    # ---- one set of parameters

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._hold_all(True)
        self._show_mean(True)

    def on_validation_end(self) -> None:
        self._show_mean(False)
        self._hold_all(False)
        super().on_validation_end()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._hold_all(True)

    def on_test_end(self) -> None:
        self._hold_all(False)
        super().on_test_end()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._hold_all(True)

    def on_predict_end(self) -> None:
        self._hold_all(False)
        super().on_predict_end()

    def _hold_all(self, holds: bool) -> None:
        """Replicas may have different numbers of batches, so what they borrow comes once for all of them."""
        runtime = self._whole.runtime
        if runtime is not None:
            runtime.parameters.hold_all(holds)

    def _show_mean(self, shows: bool) -> None:
        runtime = self._whole.runtime
        if runtime is not None:
            runtime.parameters.show_mean(shows)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._whole.runtime is not None:
            parameters = self._whole.runtime.parameters
            parameters.average()
            if parameters.loose is not None and parameters.loose.summary:
                tell(parameters.loose.summary)


def _check(trainer: Trainer, mode: str) -> None:
    """Refuse features that need one set of parameters in each step."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        names: set[Any] = {kind.__name__ for kind in type(callback).__mro__}
        if names & set(_AVERAGES):
            raise ConfigError(
                f"{type(callback).__name__} averages the parameters of each step, and with sync={mode!r} every replica has "
                "others. Use sync='mean' or 'sharded', or leave it out: replicas are averaged already."
            )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ConfigError(
            f"sync_batchnorm=True makes replicas wait for each other in each step, and with sync={mode!r} each trains alone. "
            "Use sync='mean' or 'sharded', or leave it out."
        )
