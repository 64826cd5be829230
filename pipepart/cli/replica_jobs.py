"""Runs that may lose a replica (`launcher.lost_replica=continue`): each replica is a job of its own.

```
this command --- process of replica 0 --- its ranks (torch's agent starts and ends them together)
             \\-- process of replica 1 --- its ranks
```
If a rank fails, its replica ends, and only it. This command then tells the other replicas, by the list of lost ones on their
board (`runtime/replica_board.py`), and starts the replica again, which joins them. It decides nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pipepart.cli.console import quiet_libraries
from pipepart.cli.restarts import Restarts, go_on_hint
from pipepart.errors import ConfigError, PipelineError, PipepartError
from pipepart.machine import shared_cores
from pipepart.parent import end_with_parent, spawned_tied
from pipepart.runtime.replica_board import ENDED, LOST, REPLICA, STUCK, Start, has_shown, write_whole_json
from pipepart.secrets import clean, redacted
from pipepart.spare_files import spare_folder

__all__ = ["check_lost_replica", "config_of", "start_replicas"]

_LOOK = 0.2  # seconds between two looks at replicas that join
_PATIENCE = 10.0  # seconds that a replica has to end its ranks
_WRITERS = ("Progress", "Monitor")
"""Ends of names of callbacks that show or write what the first replica shows and writes already."""


def check_lost_replica(config: dict[str, Any], own_start: bool) -> None:
    """Refuse what a run that may lose a replica cannot do."""
    launcher, strategy, trainer = config["launcher"], config["strategy"], config["trainer"]
    value = launcher["lost_replica"]
    if value is None:
        return
    if value != "continue":
        raise ConfigError(f"launcher.lost_replica must be null or continue, got {value!r}")
    replicas = strategy["replicas"]
    if not isinstance(replicas, int) or replicas < 2:
        raise ConfigError(
            f"launcher.lost_replica=continue needs strategy.replicas, at least 2, got {replicas!r}: the replicas are jobs of "
            "their own from the start"
        )
    if launcher["nodes"] != 1 or launcher["engine"] != "torch" or not own_start:
        raise ConfigError(
            "launcher.lost_replica=continue is for replicas on one machine, whose processes this command starts. Several "
            "machines go on without a lost one by launcher.failures and launcher.min_nodes; torchrun, queues and Ray start "
            "processes themselves"
        )
    refused = {
        "strategy.sync": (strategy["sync"], ("mean",)),
        "strategy.sharded": (strategy["sharded"], (False,)),
        "strategy.plan": (strategy["plan"], (None,)),
        "strategy.loss": (strategy["loss"], ("batch",)),
        "strategy.compile": (strategy["compile"], (False,)),
        "launcher.spare_state": (launcher["spare_state"], (None,)),
        "trainer.max_time": (trainer["max_time"], (None,)),
    }
    for name, (given, allowed) in refused.items():
        if given not in allowed:
            raise ConfigError(
                f"{name}={given!r} is not for launcher.lost_replica=continue: leave it at {allowed[0]!r}, or use "
                "launcher.lost_replica=null"
            )


def config_of(config: dict[str, Any], replica: int) -> dict[str, Any]:
    """The configuration of the job of one replica. Only the first one shows progress and writes figures."""
    strategy = config["strategy"]
    stages = int(config["devices"]) // int(strategy["replicas"])
    own = {
        **config,
        "devices": stages,
        "strategy": {**strategy, "replicas": 1, "stages": stages},
        "launcher": {**config["launcher"], "lost_replica": None, "failures": 0},
    }
    if replica:
        shown = {
            name: node
            for name, node in config["callbacks"].items()
            if not node or not str(node.get("_target_", "")).endswith(_WRITERS)
        }
        own.update(callbacks=shown, logger={})
    return own


def folder_of(folder: Path, replica: int) -> Path:
    """The folder of a replica: that of the run for the first one."""
    return folder if replica == 0 else folder / f"replica-{replica}"


def start_replicas(config: dict[str, Any], folder: Path) -> None:
    """Start one job per replica and wait for all; raise the first cause if none of them can go on."""
    os.environ.setdefault("OMP_NUM_THREADS", str(shared_cores(int(config["devices"]))))
    restarts = Restarts(config, folder)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        while True:
            with spare_folder() as board:
                replicas = _Replicas(restarts, folder, board)
                try:
                    cause = replicas.run()
                finally:
                    replicas.end()
            if cause is None:
                return
            if not restarts.another():
                raise PipelineError(cause)
            print(f"pipepart train: {cause}\n{restarts.text}", flush=True)
    except KeyboardInterrupt as stopped:
        name = str(stopped) or "SIGINT"
        raise PipelineError(f"stopped by {name}; all processes have ended.{go_on_hint(config, folder)}") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@dataclass
class _Job:
    """The process of one start of a replica."""

    start: Start
    process: Any
    takes_part: bool
    """Whether it has joined the others, so that they wait for it."""


@dataclass
class _Replicas:
    """The jobs of all replicas, until all have ended or none can go on."""

    restarts: Restarts
    folder: Path
    board: Path
    jobs: dict[int, _Job] = field(default_factory=dict)
    lost: list[Start] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.restarts.config
        self.count = int(self.config["strategy"]["replicas"])
        self.stages = int(self.config["devices"]) // self.count

    def run(self) -> str | None:
        """Return None when all replicas have ended their training, and the cause if none goes on."""
        print(
            f"pipepart train: {self.count} replicas, each a job of {self.stages} stage{'s' * (self.stages > 1)}; if one is "
            "lost, the others go on",
            flush=True,
        )
        for replica in range(self.count):
            self._begin((replica, 0))
        while self.jobs:
            wait([job.process.sentinel for job in self.jobs.values()], _LOOK)
            for job in [job for job in self.jobs.values() if job.process.exitcode is not None]:
                cause = self._left(job)
                if cause is not None:
                    return cause
            if not any(job.takes_part for job in self.jobs.values()):  # nobody is left whom a replica could join
                break
            self._let_join()
        return None

    def end(self) -> None:
        """End all processes that still run."""
        for job in self.jobs.values():
            job.process.terminate()
        for job in self.jobs.values():
            _end(job.process)
        self.jobs.clear()

    def _begin(self, start: Start) -> None:
        own = config_of(self.config, start[0])
        given = own, str(folder_of(self.folder, start[0])), str(self.board), start, self.count, os.getpid()
        process = multiprocessing.get_context("spawn").Process(target=_replica, args=given)
        with spawned_tied():
            process.start()
        self.jobs[start[0]] = _Job(start, process, takes_part=not start[1])

    def _left(self, job: _Job) -> str | None:
        """Follow the end of a job. Returns the cause of its failure if the others cannot go on."""
        replica = job.start[0]
        del self.jobs[replica]
        if job.process.exitcode == 0:
            self.ended.append(replica)
            self._tell()
            return None
        cause = f"replica {replica}: {_cause(self.board, job)}"
        joining: list[_Job] = []
        if self._joined(job):
            joining = [other for other in self.jobs.values() if not self._joined(other)]
            for other in joining:  # its state may have come from the replica that is lost
                _end(other.process)
                del self.jobs[other.start[0]]
            others = [other for other in self.jobs.values() if other.takes_part]
            if (
                not others
                or self.ended
                or (self.board / STUCK).exists()
                or not all(has_shown(self.board, o.start, self.stages) for o in others)
            ):
                return cause
        with suppress(OSError):
            (self.board / "wish").unlink()
        self.lost += [job.start, *(other.start for other in joining)]
        self._tell()
        print(f"pipepart train: {cause}\npipepart train: {self._after(job.start)}", flush=True)
        for other in joining:
            self._begin((other.start[0], other.start[1] + 1))
        return None

    def _after(self, start: Start) -> str:
        """Start a lost replica again if `launcher.failures` allows it."""
        limit = int(self.config["launcher"]["failures"])
        if 0 <= limit <= self.restarts.count:
            return f"the other replicas go on without replica {start[0]} (launcher.failures={limit})"
        self.restarts.count += 1
        self._begin((start[0], start[1] + 1))
        return f"the other replicas go on; replica {start[0]} starts again and joins them"

    def _tell(self) -> None:
        write_whole_json(self.board / "lost", {LOST: self.lost, ENDED: self.ended})

    def _joined(self, job: _Job) -> bool:
        job.takes_part = job.takes_part or has_shown(self.board, job.start, self.stages)
        return job.takes_part

    def _let_join(self) -> None:
        """Tell the others that a replica is ready to join them; one at a time."""
        waiting = [job for job in self.jobs.values() if not self._joined(job)]
        for job in waiting:
            replica, start = job.start
            ranks = [self.board / f"ready-{replica}-{start}-{stage}" for stage in range(self.stages)]
            if all(path.exists() for path in ranks):
                write_whole_json(self.board / "wish", {"replica": replica, "start": start})
                return


def _replica(
    config: dict[str, Any], folder: str, board: str, start: Start, replicas: int, parent: int
) -> None:  # pragma: no cover - a process of its own
    """Run one replica as a job of its own. A failure leaves its cause for the parent."""
    end_with_parent(parent)
    from pipepart.cli.libraries import load_libraries
    from pipepart.cli.processes import start_ranks

    Path(folder).mkdir(parents=True, exist_ok=True)
    if start[0]:
        _write_output_to(Path(folder) / "output.txt")
    quiet_libraries()
    redacted(config)
    load_libraries()  # so that its ranks may be forks
    os.environ[REPLICA] = f"{start[0]}/{start[1]}/{replicas}"
    try:
        start_ranks(config, Path(folder))
    except Exception as error:
        text = str(error) if isinstance(error, PipepartError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            _cause_file(Path(board), start).write_text(clean(text))
        sys.stdout.flush()
        os._exit(1)


def _write_output_to(path: Path) -> None:
    """Write the output of this process and of those that it starts into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _cause_file(board: Path, start: Start) -> Path:
    return board / f"cause-{start[0]}-{start[1]}"


def _cause(board: Path, job: _Job) -> str:
    with suppress(OSError):
        text = _cause_file(board, job.start).read_text()
        return text.replace("All other processes have been", "All other processes of this replica have been")
    return f"its process ended with exit code {job.process.exitcode}"


def _end(process: Any, patience: float = _PATIENCE) -> None:
    """End a process, and with it those that it has started."""
    for stop in (process.terminate, process.kill):
        if process.exitcode is None:
            stop()
            process.join(patience)
