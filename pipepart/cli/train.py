"""`pipepart train`: composes the configuration, checks it, starts one process per device, and shows the output paths."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipepart.cli.config import checked, compose_config, written
from pipepart.cli.console import bold, quiet_libraries, shown
from pipepart.cli.processes import already_started, join_started, run_as_rank, start_ranks
from pipepart.cli.ray_jobs import check_ray, start_workers
from pipepart.cli.targets import build
from pipepart.errors import ConfigError, PipepartError
from pipepart.files import load_json, may_fail
from pipepart.secrets import redacted_override, write_private
from pipepart.values import COUNT, check_number

__all__ = [
    "SHORT",
    "check_run",
    "prepare_folder",
    "read_result",
    "ready",
    "resolve_devices",
    "run",
    "show_config",
    "train",
]

SHORT = ("logger=none", "callbacks=none", "trainer.limit_val_batches=0", "trainer.val_check_interval=null")
"""Overrides of a run that only trains."""
_MOST_PROCESSES = 1024
"""Processes that are started on one machine."""


def train(overrides: Sequence[str], extra: Path | None = None) -> int:
    """Train with the configuration that the overrides make."""
    quiet_libraries()
    config = checked(compose_config(overrides, extra=extra))
    if already_started():
        config["devices"], config["launcher"]["nodes"] = join_started()
        check_run(config)
        _run_started(config, overrides)
    else:
        run(ready(config), overrides)
    return 0


def show_config(overrides: Sequence[str], extra: Path | None = None, name: str = "train") -> int:
    """`--cfg job`: print the resolved configuration."""
    print(written(checked(compose_config(overrides, name, extra))), end="")
    return 0


def ready(config: dict[str, Any], queued: bool = False) -> dict[str, Any]:
    """The configuration with its number of devices, after all checks that come before the first process."""
    config["devices"] = resolve_devices(config)
    check_run(config, queued)
    return config


def resolve_devices(config: dict[str, Any]) -> int:
    """The number of processes to start on each machine."""
    devices, nodes = config["devices"], int(config["launcher"]["nodes"])
    stages, replicas = config["strategy"]["stages"], config["strategy"]["replicas"]
    if devices != "auto":
        check_number("devices (or 'auto')", devices, COUNT, whole=True)
        return int(devices)
    if config["strategy"].get("plan"):
        from pipepart.planning import Plan

        plan = Plan.load(config["strategy"]["plan"])
        stages, replicas = plan.stages, plan.replicas
    wanted = 1
    for number in (stages, replicas):
        wanted *= number if isinstance(number, int) and number > 0 else 1
    if replicas == "auto" and stages in ("auto", 1):
        wanted = 2 * nodes
    return max(1, -(-wanted // nodes))


def check_run(config: dict[str, Any], queued: bool = False) -> None:
    """Refuse everything that can be refused before a process is started, by this command or (`queued`) by a queue."""
    from pipepart.cli.remote_output import check_places, work_folder
    from pipepart.cli.replica_jobs import check_lost_replica
    from pipepart.lightning.strategy_options import StrategyOptions
    from pipepart.runtime import fit_mesh

    strategy, launcher = config["strategy"], config["launcher"]
    if strategy.get("plan") and not os.path.isfile(strategy["plan"]):
        raise ConfigError(f"strategy.plan: there is no file {strategy['plan']!r}")
    options = StrategyOptions.among(strategy)
    if int(config["devices"]) > _MOST_PROCESSES:
        raise ConfigError(f"devices: at most {_MOST_PROCESSES} processes on one machine, got {config['devices']}")
    if options.plan is None:
        fit_mesh(int(config["devices"]) * int(launcher["nodes"]), options.stages, options.replicas)
    _check_optimizer(config)
    _check_output(work_folder(str(config["output"])))
    check_places(config)
    if launcher["engine"] not in ("torch", "ray"):
        raise ConfigError(f"launcher.engine must be torch or ray, got {launcher['engine']!r}")
    least = launcher["min_nodes"]
    if least is not None and (least > launcher["nodes"] or launcher["engine"] == "ray"):
        raise ConfigError(
            f"launcher.min_nodes={least} must be at most launcher.nodes={launcher['nodes']}, and is not for Ray, which places "
            "workers itself"
        )
    spare = launcher["spare_state"]
    if spare not in (None, "neighbour"):
        raise ConfigError(f"launcher.spare_state must be null or neighbour, got {spare!r}")
    own_start = launcher["engine"] == "torch" and not (queued or already_started())
    if spare is not None and (launcher["nodes"] < 2 or not own_start):
        raise ConfigError(
            "launcher.spare_state=neighbour keeps the state of a machine on another one: it needs launcher=nodes with at least "
            "two machines. torchrun, queues and Ray start the processes of a job again themselves, from a checkpoint"
        )
    check_lost_replica(config, own_start)
    if launcher["engine"] == "ray":
        check_ray(config)
    elif launcher["nodes"] > 1 and not launcher["address"] and not (queued or already_started()):
        raise ConfigError(
            "launcher.nodes > 1 needs launcher.address=HOST:PORT of one of the machines, the same on each"
        )


def _check_optimizer(config: dict[str, Any]) -> None:
    """Construct an optimizer of torch on one parameter: torch itself refuses invalid values."""
    import torch

    node = config.get("optimizer")
    if node and str(node["_target_"]).startswith("torch.optim."):
        try:
            build({**node, "_partial_": False}, path="optimizer", params=[torch.nn.Parameter(torch.zeros(1, 1))])
        except PipepartError:
            raise
        except Exception as error:
            raise ConfigError(f"optimizer: {node['_target_']} refuses its arguments: {error}") from error


def _check_output(folder: Path) -> None:
    """Refuse a folder that cannot be made because a file has its name or that of a parent, or that is not writable."""
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise ConfigError(f"output: {error}") from error
    if not usable:
        reason = "cannot be written" if nearest.is_dir() else "is a file"
        raise ConfigError(f"output={folder}: {shown(nearest)} {reason}; choose another folder")


def prepare_folder(config: dict[str, Any], overrides: Sequence[str]) -> Path:
    """Make the folder of the run with its configuration, and the link `latest` to it."""
    from pipepart.cli.remote_output import work_folder

    given = work_folder(str(config["output"]))
    folder = given.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        said = " ".join(map(redacted_override, overrides)).replace("\n", " ")
        write_private(folder / "config.yaml", f"# pipepart train {said}".rstrip() + "\n" + written(config))
    except OSError as error:
        raise ConfigError(f"output={given}: {error.strerror or error}; choose another folder") from error
    root = Path(given.parts[0]) if not given.is_absolute() and len(given.parts) > 1 else given.parent
    link = root / "latest"
    with may_fail(f"the link {shown(link)} to the folder of this run"):
        if link.is_symlink() or not link.exists():
            fresh = root / f".latest-{os.getpid()}"
            fresh.symlink_to(os.path.relpath(folder, root.absolute()))
            fresh.replace(link)
    return folder


def run(config: dict[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run a checked configuration on processes of this machine; returns the result that rank 0 wrote."""
    folder = prepare_folder(config, overrides)
    count = f"{config['devices']} process{'es' if config['devices'] > 1 else ''}"
    nodes = config["launcher"]["nodes"]
    if config["launcher"]["engine"] == "ray":
        count = f"{nodes * config['devices']} workers of Ray"
    elif nodes > 1:
        count += f" on each of {nodes} machines"
    print(f"{bold('pipepart train')}  recipe {config['name']}, {count}, output in {shown(folder)}", flush=True)
    from pipepart.cli.remote_output import localised, send_output

    try:
        engine = start_workers if config["launcher"]["engine"] == "ray" else start_ranks
        if config["launcher"]["lost_replica"] is not None:
            from pipepart.cli.replica_jobs import start_replicas

            engine = start_replicas
        engine(localised(config, folder), folder)
        _show_paths(folder)
    finally:
        send_output(config, folder)
    if nodes > 1 and config["launcher"]["engine"] == "torch" and not (folder / "result.json").exists():
        print("\nThe first rank ran on another machine: the report and the checkpoints are there.", flush=True)
    return read_result(folder)


def _run_started(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Run this process as one rank of a job; all ranks use the folder of rank 0."""
    from pipepart.cli.remote_output import localised, send_output, work_folder
    from pipepart.runtime.rendezvous import job_store, join_job

    first = os.environ["RANK"] == "0"
    if int(os.environ["WORLD_SIZE"]) > 1:
        join_job(timedelta(seconds=float(config["launcher"]["wait"])))
        if first:
            job_store().set("pipepart/output", str(config["output"]))
        config["output"] = job_store().get("pipepart/output").decode()
    folder = work_folder(str(config["output"])).absolute()
    if first:
        prepare_folder(config, overrides)
    run_as_rank(json.dumps(localised(config, folder)), str(folder))
    if first:
        _show_paths(folder)
        send_output(config, folder)


def read_result(folder: Path) -> dict[str, Any]:
    """The result that rank 0 has written, with its folder."""
    with suppress(PipepartError):
        return {**load_json(folder / "result.json").entries(), "folder": str(folder)}
    return {"folder": str(folder)}


def _show_paths(folder: Path) -> None:
    print()
    for name, file in (
        ("report", "report.html"),
        ("plan", "plan.json"),
        ("trace", "trace.json"),
        ("checkpoint", "checkpoints/last.ckpt"),
        ("metrics", "metrics/metrics.csv"),
        ("tracking", "wandb"),
        ("tracking", "tensorboard"),
        ("configuration", "config.yaml"),
        ("logs", "logs"),
    ):
        if (folder / file).exists():
            print(f"{bold(name.rjust(14))}  {shown(folder / file)}", flush=True)
