"""Runs that go on after a failure: from their last checkpoint, and with the machines that are left.

With fewer machines a run has another shape. The stages stay if they can, so that a stage needs no more memory, and the replicas
that are left take more batches for each step, so that the samples of a step stay the same.
"""

from __future__ import annotations

import os
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipepart.cli.console import shown
from pipepart.errors import PipelineError
from pipepart.spare_files import SPARE_FOLDER

if TYPE_CHECKING:
    from pipepart.lightning.remote_files import RemoteFile

__all__ = [
    "JOINED",
    "RESUME",
    "RUN_OF_MACHINES",
    "SPARE",
    "MoreMachines",
    "Restarts",
    "go_on_hint",
    "joining_note",
    "last_checkpoint",
    "resume_of_first",
    "shape_left",
    "written",
]

JOINED = 75
"""The exit code of ranks that have ended after a checkpoint, so that more machines can join."""
RUN_OF_MACHINES = "pipepart"
"""The name that torch's agents give to a run on several machines."""
RESUME = "PIPEPART_RESUME"
"""The variable with the checkpoint from which the first machine of a job resumes; the others have not seen it written."""

SPARE = "PIPEPART_SPARE"
"""The variable with the state in the memory of the machines with which they go on; empty without one."""


class MoreMachines(Exception):
    """The ranks end after a checkpoint, since more machines wait to join."""

    _pipepart_told = True  # it is no failure of a rank that others have to hear of


def joining_note(folder: Path) -> Path:
    """The file on the first machine that is there while other machines wait to join the run."""
    return folder / "logs" / "machines-wait"


def resume_of_first(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the checkpoint from which the first machine resumes, or the state in memory of all machines."""
    if RESUME not in os.environ or os.environ.get("TORCHELASTIC_RUN_ID") != RUN_OF_MACHINES:
        return config
    resume: str | None = os.environ[RESUME] or None
    if os.environ.get(SPARE):
        resume = str(Path(os.environ[SPARE_FOLDER], os.environ[SPARE]))
    return {**config, "resume": resume}


def last_checkpoint(config: dict[str, Any], folder: Path) -> Path | RemoteFile:
    """The last checkpoint of a run, which is at the address of its output if that is one."""
    from pipepart.cli.remote_output import checkpoint_place

    return checkpoint_place(config, folder)


def written(path: Path | RemoteFile) -> Any:
    """A value that is another one after the checkpoint was written again; None without a checkpoint."""
    if isinstance(path, Path):
        return path.stat().st_mtime_ns if path.exists() else None
    try:
        return path.changed() if path.exists() else None
    except Exception as error:  # those of the libraries of object stores are of many kinds
        raise PipelineError(f"it is not known whether there is a checkpoint {path}: {error}") from error


def go_on_hint(config: dict[str, Any], folder: Path) -> str:
    """How to go on from the last checkpoint, for a message; empty without one."""
    last = last_checkpoint(config, folder)
    with suppress(PipelineError):
        return "" if written(last) is None else f" Continue with resume={shown(last)}"
    return ""


class Restarts:
    """The restarts of a run that `launcher.failures` allows."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.config, self._folder = config, folder
        self._before = written(last_checkpoint(config, folder))
        self.count = 0
        self.begun_again = self.after_checkpoint = False
        self.text = ""
        """What the last call of `another` has decided, for the user."""

    def another(self) -> bool:
        """Whether to start again after a failure. If so, `config` resumes from the last checkpoint of this run."""
        limit = int(self.config["launcher"]["failures"])
        if 0 <= limit <= self.count:
            return False
        self.count += 1
        self.after_checkpoint = False
        allowed = "" if limit < 0 else f" of {limit}"
        self._go_on(f"restart {self.count}{allowed}")
        return True

    def joined(self) -> None:
        """Start again after a checkpoint, with machines that have come. That is no failure."""
        self.after_checkpoint = True
        self._go_on("more machines have come: going on with them")

    def _go_on(self, why: str) -> None:
        self.begun_again = True
        last = last_checkpoint(self.config, self._folder)
        if written(last) not in (None, self._before):
            self.config = {**self.config, "resume": str(last)}
        start = "the beginning" if self.config["resume"] is None else shown(self.config["resume"])
        spare = self.config["launcher"].get("spare_state") is not None and not self.after_checkpoint
        self.text = f"pipepart train: {why}, from {'the state in memory if there is one, or ' * spare}{start}"


def shape_left(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration for the processes that this job has, which may be fewer than were asked for."""
    world, here = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = world // here
    if nodes >= int(config["launcher"]["nodes"]):
        return config
    from pipepart.runtime import fit_mesh

    config = deepcopy(config)
    strategy, trainer = config["strategy"], config["trainer"]
    asked = fit_mesh(int(config["launcher"]["nodes"]) * here, strategy["stages"], strategy["replicas"])
    stages = next((n for n in range(asked.stages, world + 1) if world % n == 0), world)
    replicas = world // stages
    batches = int(trainer["accumulate_grad_batches"] or 1)
    factor, rest = divmod(asked.replicas, replicas)
    kept = f"each step takes {factor * batches} batches, so that its samples stay the same"
    if rest:
        kept = f"a step now has the samples of {replicas * batches} batches in place of {asked.replicas * batches}"
    else:
        trainer["accumulate_grad_batches"] = factor * batches
        if isinstance(trainer["val_check_interval"], int):
            trainer["val_check_interval"] *= factor
    config["launcher"]["nodes"], config["launcher"]["fewer"] = nodes, True
    strategy["stages"], strategy["replicas"], strategy["plan"] = stages, replicas, None
    if os.environ.get("RANK") == "0":
        print(
            f"pipepart train: {nodes} of the machines are left: {replicas} x {stages} (replicas x stages) in place of "
            f"{asked.replicas} x {asked.stages}; {kept}",
            flush=True,
        )
    return config
