"""Notebooks: the ranks of a run are forks of the running process, which gets their results and the trained weights."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.multiprocessing as mp
from torch import nn

from pipepart.errors import ConfigError
from pipepart.lightning.announce import tell
from pipepart.lightning.namespaces import of
from pipepart.lightning.pipeline_strategy import PipelineStrategy
from pipepart.parent import end_with_parent
from pipepart.recording.inputs import trees
from pipepart.runtime.rendezvous import job_folder

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["ForkLauncher", "NotebookStrategy"]

_ATTRIBUTES = (
    "dirpath", "best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "current_score",
    "last_model_path", "best_score", "stopped_epoch", "wait_count",
)  # fmt: skip
"""Attributes of Lightning's callbacks that a program reads after a run."""
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class ForkLauncher:
    """Runs each call of the trainer in forks of this process, one for each device, and brings back what they leave behind."""

    def __init__(self, strategy: PipelineStrategy) -> None:
        self._strategy = strategy
        self._processes: list[Any] = []
        self._fitted = False
        self.parent = os.getpid()
        """The process in which the trainer was made."""

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call a function of the trainer in each fork. Returns its result on rank 0."""
        if "fork" not in mp.get_all_start_methods():
            raise ConfigError(
                f"notebooks need processes by fork, which {sys.platform} does not have: run a script instead."
            )
        if self._strategy.num_nodes > 1:
            raise ConfigError("pipepart_notebook starts processes on this host only: use num_nodes=1, or run a script.")
        if trainer is not None:
            _check_devices(trainer)
        fitting = trainer is not None and trainer.state.fn == "fit"
        if fitting and self._fitted:
            raise ConfigError(
                "this trainer has run a fit in other processes, whose optimizers have ended with them. Make a new Trainer, and "
                "resume with fit(ckpt_path=...) if the training is to go on."
            )
        with job_folder(), tempfile.TemporaryDirectory(prefix="pipepart-notebook-") as folder:
            file = Path(folder) / "results"
            call = (function, args, kwargs, trainer, str(file))
            running = mp.start_processes(
                self._rank, call, nprocs=self._strategy.num_processes, join=False, start_method="fork"
            )
            assert running is not None
            self._processes = running.processes
            try:
                while not running.join():
                    pass
            finally:  # after an error, or an interrupt of the cell, no process may stay
                self.kill(signal.SIGKILL)
                self._processes = []
            found = torch.load(file, weights_only=False)  # written by rank 0 into a folder of this user
        self._fitted |= fitting
        if trainer is not None:
            _bring_back(trainer, found)
        return found["results"]

    def _rank(
        self,
        rank: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trainer: Trainer | None,
        file: str,
    ) -> None:
        """The work of one fork."""
        os.environ["LOCAL_RANK"] = str(rank)
        try:
            results = function(*args, **kwargs)
            left = {} if trainer is None else _left_behind(trainer)
        except BaseException as error:
            self._strategy.on_exception(error)
            raise
        if rank == 0:
            torch.save({**left, "results": trees.moved(results, "cpu")}, file)

    def kill(self, signum: Any) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)


def _check_devices(trainer: Trainer) -> None:
    """Raise Lightning's error if this process has used a GPU, which its forks could not use then."""
    of(trainer).module("fabric.strategies.launchers.multiprocessing")._check_bad_cuda_fork()


def _left_behind(trainer: Trainer) -> dict[str, Any]:
    """What a run has changed in this process and a program may read afterwards. Every rank must call it."""
    module: nn.Module = trainer.lightning_module
    connector, fit = trainer._logger_connector, trainer.fit_loop
    weights = None
    if any(parameter.is_meta for parameter in module.parameters()):
        tell("pipepart: the module stays in parts, so the weights are not brought back. Save a checkpoint in the run.")
    else:
        weights = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    return {
        "weights": weights,
        "state": trainer.state,
        "metrics": {name: trees.moved(dict(getattr(connector, name)), "cpu") for name in _METRICS},
        "callbacks": [
            {key: value for key, value in vars(callback).items() if key in _ATTRIBUTES}
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        ],
        "progress": [part.state_dict() for part in _progress(fit)],
        "stop": trainer.should_stop,
    }


def _bring_back(trainer: Trainer, found: dict[str, Any]) -> None:
    """Give this process what the run has left behind in the process of rank 0."""
    module, weights = trainer.lightning_module, found["weights"]
    if weights is not None and module.load_state_dict(weights, strict=False).unexpected_keys:
        module.configure_model()  # has made layers in the other processes
        module.load_state_dict(weights, strict=False)
    trainer.state = found["state"]
    trainer.should_stop = found["stop"]
    for name, metrics in found["metrics"].items():
        setattr(trainer._logger_connector, name, metrics)
    for callback, attributes in zip(trainer.callbacks, found["callbacks"]):  # type: ignore[attr-defined]
        for key, value in attributes.items():
            setattr(callback, key, value)
    for part, state in zip(_progress(trainer.fit_loop), found["progress"]):
        part.load_state_dict(state)


def _progress(fit: Any) -> list[Any]:
    """The counters of a fit: epochs, batches, and steps of the optimizer."""
    return [fit.epoch_progress, fit.epoch_loop.batch_progress, fit.epoch_loop.automatic_optimization.optim_progress]


class NotebookStrategy(PipelineStrategy):
    """`PipelineStrategy` for notebooks and other interactive sessions: ``Trainer(strategy="pipepart_notebook")``.

    The ranks are forks of the running process, as with Lightning's own `ddp_notebook`. After a run the process has the trained
    weights, the results and the logged values; parameters stay the same objects.
    """

    strategy_name: ClassVar[str] = "pipepart_notebook"

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = ForkLauncher(self)  # type: ignore[assignment]

    def setup_environment(self) -> None:
        super().setup_environment()
        if isinstance(self._launcher, ForkLauncher) and self._launcher.parent != os.getpid():
            end_with_parent(self._launcher.parent)
            # The threads of OpenMP that the parent has used do not exist in a fork, and a second thread would wait for them.
            torch.set_num_threads(1)
