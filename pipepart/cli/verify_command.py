"""`pipepart verify`: one process on the whole batch, the same in micro-batches, and the pipeline, as a table."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipepart.cli.config import checked, compose_config
from pipepart.cli.console import bold, quiet_libraries
from pipepart.cli.plan_command import made_by
from pipepart.cli.ranks import already_started, start_ranks
from pipepart.cli.train import check_run, resolve_devices
from pipepart.errors import ConfigError

__all__ = ["verify", "verify_here"]

_SHORT = (
    "logger=none", "callbacks=none", "strategy.verify=true", "trainer.max_steps=0", "trainer.limit_val_batches=0",
    "trainer.val_check_interval=null",
)  # fmt: skip


def verify(words: Sequence[str], extra: Path | None = None) -> int:
    """Start the processes that the overrides describe, and print the table of a recipe or of `module:callable`."""
    if already_started():
        raise ConfigError("pipepart verify starts its processes itself: call it without torchrun or srun")
    quiet_libraries()
    named = [word for word in words if ":" in word and "=" not in word]
    overrides = [word for word in words if word not in named]
    if len(named) > 1:
        raise ConfigError(f"one module:callable at a time, got {' and '.join(named)}")
    config = checked(compose_config([*overrides, *_SHORT], extra=extra))
    if int(config["launcher"]["nodes"]) > 1:
        raise ConfigError("pipepart verify runs on one machine: use strategy.verify=true in a run on several")
    config["devices"] = resolve_devices(config)
    check_run(config)
    title = named[0] if named else f"recipe {config['name']}"
    print(f"{bold('pipepart verify')}  {title}, {config['devices']} processes", flush=True)
    if named:
        made_by(named[0])  # a wrong name is told before any process is started
    folder = Path(tempfile.mkdtemp(prefix="pipepart-verify-"))
    start_ranks(config, folder, named[0] if named else None)
    shutil.rmtree(folder, ignore_errors=True)  # kept if it failed: the tracebacks are there
    return 0


def verify_here(config: dict[str, Any], named: str) -> None:
    """What one rank does for a `module:callable`."""
    from pipepart.options import Options
    from pipepart.pipeline import Pipeline

    module, arguments = made_by(named)
    options = {name: config["strategy"][name] for name in Options.names() if name != "plan"}
    pipe = Pipeline(module, arguments, **options)
    if os.environ.get("RANK", "0") == "0":
        print(pipe.plan.describe(), flush=True)
