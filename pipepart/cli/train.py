"""`pipepart train`: compose once, start one process per device, say where everything is."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipepart.cli.config import compose_config
from pipepart.errors import ConfigError
from pipepart.planning import check_request
from pipepart.runtime import fit_mesh

__all__ = ["train"]


def train(overrides: Sequence[str], show_only: bool = False) -> int:
    """The parent: checks what can be checked, then starts the ranks and waits for them."""
    config = compose_config(overrides)
    if show_only:
        print(OmegaConf.to_yaml(config))
        return 0
    _check(config)
    folder = Path(config.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
    print(f"pipepart: {config.recipe} on {config.devices} processes, output in {_shown(folder)}", flush=True)
    code = _start_ranks(config, folder)
    if code == 0:
        _say_where(folder)
    return code


def _check(config: DictConfig) -> None:
    strategy = config.strategy
    check_request(strategy.schedule, strategy.microbatches, strategy.stages)
    fit_mesh(int(config.devices), strategy.stages, strategy.replicas)
    _recipe(config.recipe)
    if config.logger.name not in ("wandb", "csv", "none"):
        raise ConfigError(f"logger.name is {config.logger.name!r}; expected wandb, csv or none")


def _recipe(name: str) -> Any:
    if not str(name).startswith(("recipes.", "pipepart.")):
        raise ConfigError(f"recipe is {name!r}; expected a module in recipes, such as recipes.gpt")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"there is no recipe module {name!r} ({error})") from error
    if not hasattr(module, "build"):
        raise ConfigError(f"{name} is no recipe: it has no function build(model, data, optimizer)")
    return module


def _start_ranks(config: DictConfig, folder: Path) -> int:
    """One process per device by torch's own agent: it ends all ranks when one fails, and names the first cause."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(int(config.devices))))
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(config.devices),
        run_id=f"pipepart-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    try:
        elastic_launch(launch, _rank)(OmegaConf.to_yaml(config), str(folder))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
        print(f"pipepart train: rank {rank} failed first (exit code {failure.exitcode}).\n{message}", file=sys.stderr)
        return 1
    return 0


def _threads(processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // processes)


def _rank(config_text: str, folder: str) -> None:
    """One rank: builds the recipe and the trainer from the configuration that the parent composed, and trains."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from pipepart.cli.fit import fit

    record(fit)(OmegaConf.create(config_text), Path(folder))


def _say_where(folder: Path) -> None:
    found = [
        ("report", folder / "report.html"),
        ("plan", folder / "plan.json"),
        ("trace", folder / "trace.json"),
        ("checkpoint", folder / "checkpoints" / "last.ckpt"),
        ("metrics", folder / "metrics" / "metrics.csv"),
        ("tracking", folder / "wandb"),
        ("configuration", folder / "config.yaml"),
    ]
    for name, path in found:
        if path.exists():
            print(f"{name:>14}  {_shown(path)}")


def _shown(path: Path) -> str:
    """Relative to where the user stands, if it is below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
