"""The processes of a run: they are started and ended together, and the first cause of a failure is shown.

Torch's own agent starts and watches the ranks. They receive the configuration that the parent composed. A rank that fails
writes its reason into the folder of the run; the first reason is shown.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipepart.cli.console import quiet_libraries, shown
from pipepart.cli.forks import can_fork, run_fresh
from pipepart.cli.libraries import load_libraries
from pipepart.cli.restarts import (
    JOINED,
    RESUME,
    SPARE,
    MoreMachines,
    Restarts,
    go_on_hint,
    joining_note,
    resume_of_first,
    shape_left,
)
from pipepart.errors import ConfigError, PipelineError, PipepartError
from pipepart.files import load_json
from pipepart.machine import shared_cores
from pipepart.machine.ports import JOB_PORTS
from pipepart.parent import end_with_parent, spawned_tied
from pipepart.secrets import clean, clean_output, redacted
from pipepart.spare_files import spare_folder
from pipepart.values import printable

__all__ = [
    "already_started",
    "first_reason",
    "join_started",
    "leave_reason",
    "refuse_inside_job",
    "run_as_rank",
    "run_as_task",
    "silence_tracker",
    "start_ranks",
]

_PATIENCE = 2  # seconds that a rank has to end by itself

_NAMES = {  # rank, local rank, processes, machines, this machine, job: variables of srun and submitit's local executor
    "SLURM_PROCID": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_ID"),
    "SUBMITIT_LOCAL_GLOBALID": tuple(
        f"SUBMITIT_LOCAL_{name}" for name in ("GLOBALID", "LOCALID", "NTASKS", "JOB_NUM_NODES", "NODEID", "JOB_ID")
    ),
}


def _started_by() -> tuple[str, ...] | None:
    """The variables of srun or submitit, if it has started this process as one of several."""
    for mark, names in _NAMES.items():
        if mark in os.environ and int(os.environ.get(names[2], "1")) > 1:
            return names
    return None


def already_started() -> bool:
    """Whether a launcher (torchrun, srun, submitit) has started this process as one rank of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ or _started_by() is not None


def refuse_inside_job(command: str) -> None:
    """Refuse a command that starts its own processes in a process that a launcher has started."""
    if already_started():
        raise ConfigError(f"{command} starts its processes itself: call it without torchrun or srun")


def join_started() -> tuple[int, int]:
    """Set the variables of torchrun from those of SLURM or submitit; returns (processes here, machines)."""
    names, started_by = os.environ, _started_by()
    if "TORCHELASTIC_RUN_ID" not in names and started_by is not None:
        rank, local, count, nodes, node, job = (
            names.get(name, other) for name, other in zip(started_by, ("0", "0", "1", "1", "0", "0"))
        )
        host = "127.0.0.1"
        if "SLURM_PROCID" in started_by:
            host = _first_host(names.get("SLURM_STEP_NODELIST", names.get("SLURM_JOB_NODELIST", host)))
        number = int("".join(c for c in job if c.isdigit()) or 0)
        names.update(
            RANK=rank, LOCAL_RANK=local, WORLD_SIZE=count, LOCAL_WORLD_SIZE=str(int(count) // int(nodes)), GROUP_RANK=node,
            TORCHELASTIC_RUN_ID=f"job-{job}",
        )  # fmt: skip
        names.setdefault("MASTER_ADDR", host)
        names.setdefault("MASTER_PORT", str(JOB_PORTS[number % len(JOB_PORTS)]))
    here = int(names["LOCAL_WORLD_SIZE"])
    return here, int(names["WORLD_SIZE"]) // here


def _first_host(names: str) -> str:
    """The first host in SLURM's list: node03 in `node[03-07,12],other`."""
    first, bracket, numbers = names.partition("[")
    return first + re.split(r"[-,\]]", numbers)[0] if bracket and "," not in first else names.split(",")[0]


def start_ranks(config: dict[str, Any], folder: Path, named: str | None = None) -> None:
    """Start one process per device on this machine and wait for all; raise the first cause if one fails.

    `named` is a `module:callable` of the command line to verify instead of training a recipe. It is not part of the
    configuration, which must not be able to name code that is run.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from pipepart.cli.agent import launch_config
    from pipepart.runtime.rendezvous import job_folder

    quiet_libraries()  # again: the agent's loggers exist only now
    silence_tracker()
    logs = folder / "logs"
    os.environ.setdefault("OMP_NUM_THREADS", str(shared_cores(int(config["devices"]))))
    alone = int(config["launcher"]["nodes"]) == 1
    forks = alone and can_fork()  # the agents of several machines meet in a store, which has a thread
    restarts = Restarts(config, folder)
    joining_note(folder).unlink(missing_ok=True)
    for name in (RESUME, SPARE):
        os.environ.pop(name, None)
    kept = ExitStack()
    if config["launcher"]["spare_state"] is not None:
        kept.enter_context(spare_folder())
    try:
        while True:
            launch = launch_config(
                config, logs, _PATIENCE, "fork" if forks else "spawn", restarts.begun_again, restarts.after_checkpoint
            )
            given = (json.dumps(config), str(folder), named, os.getpid())
            try:
                with spawned_tied(), job_folder() if alone else nullcontext():
                    if forks:
                        elastic_launch(launch, run_fresh)(run_as_rank, *given)
                    else:
                        elastic_launch(launch, run_as_rank)(*given)
                return
            except ChildFailedError as error:
                joined = any(failure.exitcode == JOINED for failure in error.failures.values())
                cause = "" if joined else _first_cause(error, logs)
            joining_note(folder).unlink(missing_ok=True)
            if joined:
                restarts.joined()
            elif not restarts.another():
                raise PipelineError(cause)
            print(restarts.text if joined else f"pipepart train: {cause}\n{restarts.text}", flush=True)
            config = restarts.config
            for file in logs.glob("failure-rank*.json"):
                file.unlink(missing_ok=True)
    except (SignalException, KeyboardInterrupt) as error:
        name = signal.Signals(error.sigval).name if isinstance(error, SignalException) else "SIGINT"
        hint = go_on_hint(config, folder)
        raise PipelineError(f"stopped by {name}; all processes have ended.{hint}") from None
    finally:
        kept.close()


def silence_tracker() -> None:
    """Silence the warnings of Python's resource tracker about semaphores of killed ranks, which it has removed."""
    filters = os.environ.get("PYTHONWARNINGS", "").split(",")
    os.environ["PYTHONWARNINGS"] = ",".join(
        dict.fromkeys([*filter(None, filters), "ignore:resource_tracker:UserWarning"])
    )


def run_as_rank(config_text: str, folder: str, named: str | None = None, parent: int | None = None) -> None:
    """Run this process as one rank with the configuration that the parent composed, as long as `parent` runs."""
    end_with_parent(os.getppid() if parent is None else parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the ranks
    config = json.loads(config_text)
    redacted(config)  # from here on, its secrets are hidden
    with clean_output():
        try:
            load_libraries()
            if named is not None:
                from pipepart.cli.dry_runs import verify_here

                verify_here(config, named)
            else:
                from pipepart.cli.fit import fit

                fit(shape_left(resume_of_first(config)), Path(folder))
        except MoreMachines:
            sys.stdout.flush()
            os._exit(JOINED)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return
            leave_reason(error, int(os.environ.get("RANK", "0")), Path(folder) / "logs")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no threads, no hooks at exit: others wait for this one to be gone


def run_as_task(config: dict[str, Any], folder: Path) -> str | None:
    """Run this process as one rank in a task of a queue; returns the first cause of a failure, or None."""
    logs = folder / "logs"
    try:
        from pipepart.cli.fit import fit
        from pipepart.runtime.port_store import abandoned_if

        with clean_output(), abandoned_if(lambda: next((reason["text"] for reason in _reasons(logs)), None)):
            fit(config, folder)
    except Exception as error:
        leave_reason(error, int(os.environ["RANK"]), logs)
        if int(os.environ["RANK"]) == 0 and _is_echo(error):
            time.sleep(_PATIENCE)  # the rank that failed first may still be writing its reason
        return first_reason(logs) or str(error)
    return None


def _is_echo(error: BaseException) -> bool:
    """Whether a rank failed only because another rank failed."""
    return isinstance(error, PipelineError) and any(word in str(error) for word in ("another rank", "lost"))


def leave_reason(error: BaseException, rank: int, logs: Path) -> None:
    """Write the reason of a failure for the parent, or print it if that is not possible (on a full disk)."""
    text = str(error) if isinstance(error, PipepartError) else f"{type(error).__name__}: {error}"
    reason = {
        "rank": rank,
        "when": time.time(),
        "echo": _is_echo(error),
        "known": isinstance(error, PipepartError),
        "text": printable(clean(text), keep="\n\t"),
        "where": printable(clean(_where(error))),
    }
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"failure-rank{rank}.json").write_text(json.dumps(reason))
        trace = clean("".join(traceback.format_exception(error)))
        (logs / f"traceback-rank{rank}.txt").write_text(trace, encoding="utf-8", errors="backslashreplace")
    except OSError as full:
        with suppress(OSError):
            print(f"rank {rank} failed: {reason['text']}\n(its reason could not be written to {shown(logs)}: {full})",
                  file=sys.stderr, flush=True)  # fmt: skip


def _where(error: BaseException) -> str:
    """The last line of the user's own code (or a recipe's) in the traceback."""
    libraries = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python", f"{os.sep}pipepart{os.sep}", "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        inside_recipe = f"{os.sep}recipes{os.sep}" in frame.filename
        if inside_recipe or not any(part in frame.filename for part in libraries):
            file = frame.filename.split(f"site-packages{os.sep}")[-1]
            return f"{shown(file) if os.path.isabs(file) else file}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


@dataclass(frozen=True)
class _Reason:
    """The fields of the file in which a rank leaves its reason."""

    rank: int
    when: float
    echo: bool
    known: bool
    text: str
    where: str


def _reasons(logs: Path) -> list[dict[str, Any]]:
    """The reasons of the ranks that failed, in the order of time; those that only lost another rank come last."""
    found = []
    for file in logs.glob("failure-rank*.json"):
        with suppress(PipepartError):  # it was written only in part
            found.append(vars(load_json(file).read(_Reason)))
    return sorted(found, key=lambda reason: (reason["echo"], reason["when"]))


def first_reason(logs: Path) -> str | None:
    """The reason that the rank which failed first has left, for the user; None if no rank has left one."""
    return next((_reason_text(reason, logs) for reason in _reasons(logs)), None)


def _first_cause(error: Any, logs: Path) -> str:
    """The reason of the rank that failed first; ranks that only lost another rank come last."""
    reasons = _reasons(logs)
    killed = [
        (rank, failure)
        for rank, failure in sorted(error.failures.items())
        if failure.exitcode < 0 and not any(reason["rank"] == rank for reason in reasons)
    ]
    if killed and all(reason["echo"] for reason in reasons):
        rank, failure = killed[0]
        name = signal.Signals(-failure.exitcode).name
        hint = (
            " The system does that when memory runs out: try more micro-batches or a smaller batch."
            if name == "SIGKILL"
            else ""
        )
        return f"rank {rank} was ended by {name}.{hint} All other processes have been ended."
    if not reasons:
        rank, failure = error.get_first_failure()
        return f"rank {rank} ended with exit code {failure.exitcode} without a reason; its output is in {shown(logs)}"
    return _reason_text(reasons[0], logs)


def _reason_text(reason: dict[str, Any], logs: Path) -> str:
    """A reason for the user: the rank, the error, the line of the user's code, and the file with the traceback."""
    lines = [f"rank {reason['rank']} failed first. All other processes have been ended.", reason["text"]]
    if reason["where"] and not reason["known"]:
        lines.append(f"at {reason['where']}")
    lines.append(f"traceback: {shown(logs / 'traceback-rank{}.txt'.format(reason['rank']))}")
    return "\n".join(lines)
