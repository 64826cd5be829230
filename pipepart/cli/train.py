"""`pipepart train`: compose once, check, start one process per device, say where everything is."""

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
from pipepart.cli.ranks import already_started, join_started, run_as_rank, start_ranks
from pipepart.cli.secrets import redacted_override
from pipepart.errors import ConfigError

__all__ = ["check_run", "prepare_folder", "read_result", "resolve_devices", "run", "show_config", "train"]


def train(overrides: Sequence[str], extra: Path | None = None) -> int:
    """One run of the configuration that the overrides make."""
    quiet_libraries()
    config = checked(compose_config(overrides, extra=extra))
    if already_started():
        config["devices"], config["launcher"]["nodes"] = join_started()
        check_run(config)
        return _run_started(config, overrides)
    config["devices"] = resolve_devices(config)
    check_run(config)
    run(config, overrides)
    return 0


def show_config(overrides: Sequence[str], extra: Path | None = None, name: str = "train") -> int:
    """`--cfg job`: the configuration as it would be used."""
    print(written(checked(compose_config(overrides, name, extra))), end="")
    return 0


def resolve_devices(config: dict[str, Any]) -> int:
    """How many processes to start on each machine."""
    devices, nodes = config["devices"], int(config["launcher"]["nodes"])
    stages, replicas = config["strategy"]["stages"], config["strategy"]["replicas"]
    if config["strategy"].get("plan"):
        from pipepart.planning import Plan

        plan = Plan.load(config["strategy"]["plan"])
        stages, replicas = plan.stages, plan.replicas
    if devices != "auto":
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ConfigError(f"devices must be a whole number of at least 1 or 'auto', got {devices!r}")
        return devices
    wanted = 1
    for number in (stages, replicas):
        wanted *= number if isinstance(number, int) and number > 0 else 1
    if (stages, replicas) == ("auto", "auto") or (stages == 1 and replicas == "auto"):
        wanted = 2 * nodes
    return max(1, -(-wanted // nodes))


def check_run(config: dict[str, Any]) -> None:
    """Refuse here what can be refused before any process is started."""
    from pipepart.lightning.options import StrategyOptions
    from pipepart.runtime import fit_mesh

    strategy, launcher = config["strategy"], config["launcher"]
    if strategy.get("plan") and not Path(strategy["plan"]).is_file():
        raise ConfigError(f"strategy.plan: there is no file {strategy['plan']!r}")
    options = StrategyOptions.among(strategy)
    if options.plan is None:
        fit_mesh(int(config["devices"]) * int(launcher["nodes"]), options.stages, options.replicas)
    if config["resume"] is not None and not Path(config["resume"]).is_file():
        raise ConfigError(f"resume: there is no checkpoint {config['resume']!r}")
    if launcher["nodes"] > 1 and not launcher["address"] and not already_started():
        raise ConfigError(
            "launcher.nodes > 1 needs launcher.address=HOST:PORT of one of the machines, the same on each"
        )


def prepare_folder(config: dict[str, Any], overrides: Sequence[str]) -> Path:
    """The folder of the run with its configuration, and the link `latest` to it."""
    folder = Path(config["output"]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    said = " ".join(map(redacted_override, overrides))
    (folder / "config.yaml").write_text(f"# pipepart train {said}".rstrip() + "\n" + written(config))
    given = Path(config["output"])
    root = Path(given.parts[0]) if not given.is_absolute() and len(given.parts) > 1 else given.parent
    link = root / "latest"
    with suppress(OSError):  # a file system without links
        if link.is_symlink() or not link.exists():
            fresh = root / f".latest-{os.getpid()}"
            fresh.symlink_to(os.path.relpath(folder, root.absolute()))
            fresh.replace(link)
    return folder


def run(config: dict[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A checked run on processes of this machine; returns what rank 0 wrote into result.json."""
    folder = prepare_folder(config, overrides)
    count = f"{config['devices']} process{'es' if config['devices'] > 1 else ''}"
    nodes = config["launcher"]["nodes"]
    if nodes > 1:
        count += f" on each of {nodes} machines"
    print(f"{bold('pipepart train')}  recipe {config['name']}, {count}, output in {shown(folder)}", flush=True)
    start_ranks(config, folder)
    result = read_result(folder)
    say_where(folder)
    if nodes > 1 and not (folder / "result.json").exists():
        print("\nThe first rank ran on another machine: the report and the checkpoints are there.", flush=True)
    return result


def _run_started(config: dict[str, Any], overrides: Sequence[str]) -> int:
    """This process is one rank of a job; all use the folder of rank 0."""
    import torch.distributed as dist

    from pipepart.runtime.rendezvous import join_job

    if int(os.environ["WORLD_SIZE"]) > 1:
        join_job(timedelta(seconds=float(config["launcher"]["wait"])))
        box = [config["output"]]
        dist.broadcast_object_list(box, 0)
        config["output"] = box[0]
    folder = Path(config["output"]).absolute()
    if os.environ["RANK"] == "0":
        prepare_folder(config, overrides)
    run_as_rank(json.dumps(config), str(folder))
    if os.environ["RANK"] == "0":
        say_where(folder)
    return 0


def read_result(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return {**json.loads((folder / "result.json").read_text()), "folder": str(folder)}
    return {"folder": str(folder)}


def say_where(folder: Path) -> None:
    found = [
        ("report", folder / "report.html"),
        ("plan", folder / "plan.json"),
        ("trace", folder / "trace.json"),
        ("checkpoint", folder / "checkpoints" / "last.ckpt"),
        ("metrics", folder / "metrics" / "metrics.csv"),
        ("tracking", folder / "wandb"),
        ("tracking", folder / "tensorboard"),
        ("configuration", folder / "config.yaml"),
        ("logs", folder / "logs"),
    ]
    print()
    for name, path in found:
        if path.exists():
            print(f"{bold(name.rjust(14))}  {shown(path)}", flush=True)
