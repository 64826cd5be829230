"""What one rank of `pipepart train` does."""

from __future__ import annotations

import importlib
import logging
import statistics
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from pipepart.planning import format_seconds
from pipepart.report import save_timeline, write_report
from pipepart.strategy import PipelineStrategy

__all__ = ["fit"]


def fit(config: DictConfig, folder: Path) -> None:
    """Build the recipe, train it, and write plan, trace and report (rank 0)."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    L.seed_everything(int(config.seed), workers=True, verbose=False)
    plain: Any = OmegaConf.to_container(config)
    module, data = importlib.import_module(config.recipe).build(plain["model"], plain["data"], plain["optimizer"])
    strategy = PipelineStrategy(**plain["strategy"])
    checkpoints = ModelCheckpoint(folder / "checkpoints", save_last=True, save_top_k=0)
    trainer = L.Trainer(
        **plain["trainer"],
        devices=int(config.devices),
        strategy=strategy,
        default_root_dir=folder,
        logger=_loggers(plain, folder),
        callbacks=[checkpoints, TQDMProgressBar(refresh_rate=10)],
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        _write_results(strategy, folder, str(config.recipe))


def _loggers(config: dict[str, Any], folder: Path) -> list[Logger]:
    options = dict(config["logger"])
    kind = options.pop("name")
    loggers: list[Logger] = [] if kind == "none" else [CSVLogger(folder, name="", version="metrics")]
    if kind == "wandb":
        found = WandbLogger(save_dir=str(folder), config={**config, "output": folder.name}, **options)
        loggers.append(found)
    return loggers


def _write_results(strategy: PipelineStrategy, folder: Path, title: str) -> None:
    plan, timeline = strategy.plan, strategy.runtime.timeline
    steps = strategy.step_times[2:] or strategy.step_times
    measured = statistics.median(steps)
    plan.save(folder / "plan.json")
    if timeline is not None:
        save_timeline(folder / "trace.json", timeline)
    write_report(folder / "report.html", plan, measured=timeline, measured_step=measured, title=title)
    error = plan.step_time / measured - 1
    print(
        f"\nmeasured   step {format_seconds(measured)} (median of {len(steps)}), predicted {format_seconds(plan.step_time)}: "
        f"{error:+.1%}"
    )
