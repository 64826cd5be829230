"""Runs with an address as their `output`, such as `s3://bucket/runs/a`.

Checkpoints are written to the address and read from it. Everything else is written into a folder of this host, and copied to
the address when the run ends or fails: files of reports, tables and logs grow while the run goes on, which object stores do
not know.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from pipepart.cli.console import bold, shown
from pipepart.errors import ConfigError
from pipepart.files import may_fail
from pipepart.lightning.remote_files import RemoteFile, check_address, is_remote, send_folder
from pipepart.lightning.sharded import is_sharded

__all__ = ["check_places", "checkpoint_place", "localised", "send_output", "work_folder"]


def work_folder(output: str) -> Path:
    """The folder of a run on this host: `output` itself, or for an address a folder of its name below `outputs`."""
    if not is_remote(output):
        return Path(output)
    scheme, _, rest = output.partition("://")
    return Path("outputs", scheme, *(part for part in rest.split("/") if part not in ("", ".", "..")))


def check_places(config: dict[str, Any]) -> None:
    """Refuse an address as output that cannot be used, and a checkpoint to resume from that is not there."""
    output, resume = str(config["output"]), config["resume"]
    processes = int(config["devices"]) * int(config["launcher"]["nodes"])
    if is_remote(output):
        check_address(output, processes, "output")
    if resume is None:
        return
    if is_remote(resume):
        check_address(resume, processes, "resume", writes=False)
        try:
            found = RemoteFile.at(resume).is_file() or is_sharded(resume)
        except Exception as error:  # those of the libraries of object stores are of many kinds
            raise ConfigError(f"resume={resume} cannot be reached: {error}") from error
    else:
        found = os.path.isfile(resume) or (os.path.isdir(resume) and is_sharded(resume))
    if not found:
        raise ConfigError(
            f"resume: there is no checkpoint {resume!r}; expected a file or the folder of a sharded checkpoint"
        )


def checkpoint_place(config: dict[str, Any], folder: Path) -> Path | RemoteFile:
    """The last checkpoint of a run."""
    if is_remote(config["output"]):
        return RemoteFile.at(config["output"]) / "checkpoints" / "last.ckpt"
    return folder / "checkpoints" / "last.ckpt"


def localised(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with the folder of this host in the place of an address, except for checkpoints."""
    output = str(config["output"])
    if not is_remote(output):
        return config

    def replaced(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: replaced(inner, name) for name, inner in value.items()}
        if isinstance(value, str) and key != "dirpath" and (value == output or value.startswith(f"{output}/")):
            return str(folder) + value[len(output) :]
        return value

    return {**config, **{section: replaced(config[section]) for section in ("callbacks", "logger")}}


def send_output(config: dict[str, Any], folder: Path) -> None:
    """Copy the files of this host to the address of a run; those of hosts without the report into `hosts/NAME`."""
    output = str(config["output"])
    if not is_remote(output):
        return
    alone = int(config["launcher"]["nodes"]) == 1 or (folder / "result.json").exists()
    target = output if alone else f"{output}/hosts/{socket.gethostname()}"
    with may_fail(f"the files of {shown(folder)} at {target}"):
        send_folder(folder, target, leave_out=("checkpoints",))
        print(f"{bold('copied to'.rjust(14))}  {target}", flush=True)
        last = checkpoint_place(config, folder)
        if last.exists():
            print(f"{bold('checkpoint'.rjust(14))}  {last}", flush=True)
