"""What one rank of `pipepart train` does."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from pipepart.cli.console import quiet_libraries, stand_out
from pipepart.cli.secrets import redacted
from pipepart.cli.targets import build, locate
from pipepart.errors import ConfigError
from pipepart.lightning import PipelineMonitor, PipelineStrategy
from pipepart.report import save_graph, save_timeline, write_report
from pipepart.report.figures import measured_step

__all__ = ["build_recipe", "fit"]


def build_recipe(config: dict[str, Any]) -> tuple[L.LightningModule, L.LightningDataModule]:
    """The module and the data that a (checked) configuration describes."""
    allow = config.get("allow") or ()
    if allow and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # packages of the user beside where the command was given
    data = build(config["data"], allow, "data")
    takes = inspect.signature(locate(config["model"]["_target_"], allow)).parameters
    more: dict[str, Any] = {}
    for section in ("optimizer", "scheduler"):
        if config.get(section) is None:
            continue
        if section not in takes:
            raise ConfigError(
                f"{section}: {config['model']['_target_']} takes no {section!r}; it chooses its own. Say {section}=null"
            )
        more[section] = build({**config[section], "_partial_": True}, allow, section)
    return build(config["model"], allow, "model", **more), data


def fit(config: dict[str, Any], folder: Path) -> None:
    """Build the recipe, train it, and write plan, trace and report (rank 0)."""
    quiet_libraries()
    stand_out()
    L.seed_everything(int(config["seed"]), workers=True, verbose=False)
    module, data = build_recipe(config)
    allow = config.get("allow") or ()
    strategy = PipelineStrategy(**config["strategy"])
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
    trainer.fit(module, datamodule=data, ckpt_path=config["resume"], weights_only=True)
    if trainer.is_global_zero:
        _write_results(trainer, strategy, folder, config)


def _without_callbacks(config: dict[str, Any]) -> dict[str, Any]:
    """Lightning adds a checkpoint and a bar by itself where there are none; here the configuration decides."""
    kinds = {str((node or {}).get("_target_", "")).rsplit(".", 1)[-1] for node in config["callbacks"].values()}
    off: dict[str, Any] = {}
    if not any("Checkpoint" in kind for kind in kinds):
        off["enable_checkpointing"] = False
    if not any("Progress" in kind for kind in kinds):
        off["enable_progress_bar"] = False
    return {key: value for key, value in off.items() if config["trainer"].get(key) is None}


def _loggers(config: dict[str, Any]) -> list[Logger]:
    allow = config.get("allow") or ()
    made: list[Logger] = []
    for name, node in config["logger"].items():
        if not node:
            continue
        made.append(build(node, allow, f"logger.{name}"))
        if isinstance(made[-1], WandbLogger):
            made[-1]._wandb_init.pop("anonymous", None)  # Lightning passes it, and wandb warns of it
            made[-1].log_hyperparams(redacted(config))
    return made


def _monitored(trainer: L.Trainer) -> list[Path]:
    """The files that the monitor among the callbacks has written."""
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, PipelineMonitor)]  # type: ignore[attr-defined]
    return [path for monitor in monitors for path in monitor.files.values()]


def _write_results(trainer: L.Trainer, strategy: PipelineStrategy, folder: Path, config: dict[str, Any]) -> None:
    plan, timeline = strategy.plan, strategy.runtime.timeline
    result: dict[str, Any] = {
        "steps": trainer.global_step,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "replicas": plan.replicas,
        "stages": plan.stages,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "predicted_step": plan.predicted,
        "simulated_step": plan.step_time,
    }
    measured = measured_step(strategy.step_times)
    if measured is not None:
        result["measured_step"] = measured
        result["samples_per_second"] = plan.batch_size * plan.replicas / measured
    written = {path.absolute() for path in _monitored(trainer)}
    if folder / "report.html" not in written:  # nobody watched the run
        if timeline is not None:
            save_timeline(folder / "trace.json", timeline)
        graph, costs = strategy.runtime.graph, strategy.runtime.costs
        plan.save(folder / "plan.json")
        save_graph(folder / "graph.json", graph, costs)
        write_report(
            folder / "report.html",
            plan,
            graph=graph,
            costs=costs,
            measured=timeline,
            measured_step=measured,
            title=str(config["name"]),
        )
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
