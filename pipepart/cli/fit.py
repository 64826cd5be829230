"""One rank of `pipepart train`: builds the recipe, trains it, shows the progress, and writes the results."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm

from pipepart.cli.console import quiet_libraries, show_messages, shown
from pipepart.cli.replica_member import ReplicaMember
from pipepart.cli.restarts import MoreMachines, joining_note
from pipepart.cli.spare_state import SpareState
from pipepart.cli.targets import build, locate
from pipepart.errors import ConfigError
from pipepart.files import may_fail, write_whole
from pipepart.lightning import PipelineMonitor, PipelineStrategy
from pipepart.lightning.replica_strategy import ReplicaPlace, ReplicaStrategy
from pipepart.report import save_graph, save_timeline, write_report
from pipepart.report.account import save_account
from pipepart.report.figures import measured_step
from pipepart.secrets import redacted
from pipepart.spare_files import SPARE_FOLDER

__all__ = ["Progress", "RunCheckpoint", "build_recipe", "fit"]

_LAST = 1.0  # seconds that rank 0, which serves the store of the job, ends after the other ranks


def build_recipe(config: dict[str, Any]) -> tuple[L.LightningModule, L.LightningDataModule]:
    """The module and the data that a (checked) configuration describes."""
    allow = config.get("allow") or ()
    if allow and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # packages of the user in the current folder
    data = build(config["data"], allow, "data")
    takes = inspect.signature(locate(config["model"]["_target_"], allow)).parameters
    more: dict[str, Any] = {}
    for section in ("optimizer", "scheduler"):
        if config.get(section) is None:
            continue
        if section not in takes:
            raise ConfigError(
                f"{section}: {config['model']['_target_']} takes no {section!r}; it creates its own. Give {section}=null"
            )
        more[section] = build({**config[section], "_partial_": True}, allow, section)
    return build(config["model"], allow, "model", **more), data


def fit(config: dict[str, Any], folder: Path) -> None:
    """Build the recipe and train it; rank 0 writes plan, trace, report and result."""
    quiet_libraries()
    show_messages()
    L.seed_everything(int(config["seed"]), workers=True, verbose=False)
    module, data = build_recipe(config)
    allow = config.get("allow") or ()
    place = ReplicaPlace.here()
    strategy = _strategy(config, place)
    strategy.as_written = False  # a run of the command line has a plan, and a report of it
    trainer = L.Trainer(
        **{**config["trainer"], **_without_callbacks(config)},
        devices=int(config["devices"]),
        num_nodes=int(config["launcher"]["nodes"]),
        strategy=strategy,
        default_root_dir=folder,
        logger=_loggers(config),
        callbacks=[build(node, allow, f"callbacks.{name}") for name, node in config["callbacks"].items() if node],
        plugins=[TorchElasticEnvironment()],
    )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunCheckpoint) and config["launcher"].get("fewer"):
            callback.note = joining_note(folder)
    if config["launcher"]["spare_state"] is not None:
        kept = SpareState(os.environ[SPARE_FOLDER], int(config["launcher"]["spare_every"]))
        trainer.callbacks.append(kept)  # type: ignore[attr-defined]
    resume = config["resume"]
    if isinstance(strategy, ReplicaStrategy) and place is not None:
        for callback in trainer.checkpoint_callbacks:  # else each replica would look for names that no other has used
            callback._enable_version_counter = False  # type: ignore[attr-defined]
        trainer.callbacks.append(ReplicaMember(strategy))  # type: ignore[attr-defined]
        resume = place.checkpoint if place.joins else resume
    trainer.fit(module, datamodule=data, ckpt_path=resume, **_plain_values_only())
    if trainer.is_global_zero and (place is None or place.first):
        _write_results(trainer, strategy, folder, config)


def _strategy(config: dict[str, Any], place: ReplicaPlace | None) -> PipelineStrategy:
    """The strategy of this rank; a replica that may be lost follows the plan of the first one."""
    if place is None:
        return PipelineStrategy(**config["strategy"])
    return ReplicaStrategy(place, **{**config["strategy"], "plan": place.plan()})


def _plain_values_only() -> dict[str, bool]:
    """The argument of `fit` for checkpoints that hold no code. Lightning 2.5 has none; there the strategy reads no other."""
    return {"weights_only": True} if "weights_only" in inspect.signature(L.Trainer.fit).parameters else {}


def _without_callbacks(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments that keep Lightning from adding a checkpoint or a bar where the configuration has none."""
    kinds = {str((node or {}).get("_target_", "")).rsplit(".", 1)[-1] for node in config["callbacks"].values()}
    off: dict[str, Any] = {}
    if not any("Checkpoint" in kind for kind in kinds):
        off["enable_checkpointing"] = False
    if not any("Progress" in kind for kind in kinds):
        off["enable_progress_bar"] = False
    return {key: value for key, value in off.items() if config["trainer"].get(key) is None}


def _loggers(config: dict[str, Any]) -> list[Logger]:
    """The loggers of the configuration; none of them records a secret."""
    allow = config.get("allow") or ()
    made: list[Logger] = []
    for name, node in config["logger"].items():
        if not node:
            continue
        kind = locate(node["_target_"], allow)
        tracked = inspect.isclass(kind) and issubclass(kind, WandbLogger)  # it records all of its arguments
        logger: Any = build(redacted(node) if tracked else node, allow, f"logger.{name}")
        record = logger.log_hyperparams
        logger.log_hyperparams = lambda params, *more, _record=record, **named: _record(_plain(params), *more, **named)
        _keep_running(logger)
        if tracked:
            logger._wandb_init.pop("anonymous", None)  # Lightning passes it, and wandb warns of it
            (Path(logger.save_dir or ".") / "wandb").mkdir(mode=0o700, parents=True, exist_ok=True)
            logger.log_hyperparams(config)
        made.append(logger)
    return made


def _keep_running(logger: Any) -> None:
    """Let a run continue without this logger when it fails (a full disk, a server that is gone), with one warning."""
    failed: list[str] = []

    def safe(name: str) -> Callable[..., None]:
        action = getattr(logger, name)

        def call(*args: Any, **kwargs: Any) -> None:
            if failed:
                return
            with may_fail(f"the record of {type(logger).__name__} ({name})"):
                action(*args, **kwargs)
                return
            failed.append(name)

        return call

    for name in ("log_hyperparams", "log_metrics", "log_graph", "save", "after_save_checkpoint", "finalize"):
        setattr(logger, name, safe(name))


def _plain(params: Any) -> dict[str, Any]:
    """Hyperparameters (a mapping or a namespace) without secrets."""
    found: dict[str, Any] = redacted(dict(params if isinstance(params, Mapping) else vars(params)))
    return found


def _write_results(trainer: L.Trainer, strategy: PipelineStrategy, folder: Path, config: dict[str, Any]) -> None:
    plan, timeline = strategy.plan, strategy.runtime.timeline
    result: dict[str, Any] = {
        "steps": trainer.global_step,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "replicas": strategy.data_mesh.replicas,
        "stages": plan.stages,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "predicted_step": plan.predicted,
        "simulated_step": plan.step_time,
    }
    measured = measured_step(strategy.step_times)
    if measured is not None:
        result["measured_step"] = measured
        result["samples_per_second"] = plan.batch_size * strategy.data_mesh.replicas / measured
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, PipelineMonitor)]  # type: ignore[attr-defined]
    writers: dict[str, Callable[[Path], Any]] = {
        "result.json": lambda path: write_whole(path, json.dumps(result, indent=1) + "\n")
    }
    if not any(monitor.writes_report(folder) for monitor in monitors):
        graph, costs, name = strategy.runtime.graph, strategy.runtime.costs, str(config["name"])
        account = strategy.account
        if timeline is not None:
            writers["trace.json"] = lambda path: save_timeline(path, timeline)
        writers["plan.json"] = plan.save
        writers["graph.json"] = lambda path: save_graph(path, graph, costs)
        if account is not None:
            writers["account.json"] = lambda path: save_account(path, account)
        writers["report.html"] = lambda path: write_report(
            path, plan, graph=graph, costs=costs, measured=timeline, measured_step=measured, title=name, account=account
        )
    for name, write in writers.items():
        with may_fail(shown(folder / name)):
            write(folder / name)
    with may_fail("the permissions of hparams.yaml"):  # the loggers' record of the configuration
        for file in folder.rglob("hparams.yaml"):
            file.chmod(0o600)


class RunCheckpoint(ModelCheckpoint):
    """Lightning's callback, which writes `last.ckpt` at every validation and at the end, with every version of Lightning.

    Newer versions write it only together with another checkpoint: with ``save_top_k=0`` once, at the end.
    """

    _step_of_last = -1
    note: Path | None = None
    """The file on the first machine that is there while other machines wait to join a run with fewer machines."""

    @property
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
            self._let_join(trainer)

    def _let_join(self, trainer: L.Trainer) -> None:
        """End all ranks after this checkpoint if other machines wait to join."""
        if self.note is not None and trainer.strategy.broadcast(self.note.exists()):
            if trainer.is_global_zero:
                time.sleep(_LAST)
            raise MoreMachines

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_last_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Any]) -> None:
        if self._step_of_last != trainer.global_step:
            super()._save_last_checkpoint(trainer, monitor_candidates)
            self._step_of_last = trainer.global_step


class Progress(ProgressBar):
    """The progress of a run: one bar over all its steps with the logged values, or lines if there is no terminal."""

    def __init__(self, refresh_rate: int = 5, lines: int = 10) -> None:
        super().__init__()
        self._refresh_rate, self._lines = refresh_rate, lines
        self._enabled = True
        self._bar: Any = None
        self._started, self._first = 0.0, 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started, self._first = time.monotonic(), trainer.global_step
        if self._shows(trainer) and sys.stdout.isatty():
            self._bar = tqdm(
                total=self._total(trainer),
                initial=trainer.global_step,
                desc="training",
                unit="step",
                colour="cyan",
                dynamic_ncols=True,
                file=sys.stdout,
            )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self._shows(trainer):
            return
        step, total = trainer.global_step, self._total(trainer)
        last = total is not None and step >= total
        if self._bar is not None:
            if step % self._refresh_rate == 0 or last:
                self._bar.set_postfix_str(self._values(trainer, pl_module), refresh=False)
                self._bar.update(step - self._bar.n)
        elif step == self._first + 1 or last or step % max(1, (total or 1000) // self._lines) == 0:
            speed = (step - self._first) / max(time.monotonic() - self._started, 1e-9)
            of = f"/{total}" if total is not None else ""
            with suppress(OSError):  # the output goes to a file on a full disk, or to a program that has ended
                print(f"step {step}{of}  {self._values(trainer, pl_module)}  {speed:.2f} steps/s", flush=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._values(trainer, pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is None and self._shows(trainer) and trainer.global_step > self._first:
            spent = time.monotonic() - self._started  # includes the last validation
            with suppress(OSError):  # as above: the last checkpoint is written after this
                print(f"done in {spent:.0f} s  {self._values(trainer, pl_module)}", flush=True)
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(kwargs.get("sep", " ").join(map(str, args)), file=sys.stdout)  # above the bar, if there is one

    def _shows(self, trainer: L.Trainer) -> bool:
        return self._enabled and trainer.is_global_zero

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _values(self, trainer: L.Trainer, module: L.LightningModule) -> str:
        found = {key: value for key, value in self.get_metrics(trainer, module).items() if key != "v_num"}
        return "  ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
        )

    @staticmethod
    def _total(trainer: L.Trainer) -> int | None:
        total = trainer.estimated_stepping_batches
        return int(total) if total != float("inf") else None
