"""Crews: the processes of a self-test. One crew of each size is started and runs many checks, one after the other.

A check that raises, ends a rank or takes too long costs the crew: it is killed, and the next check gets a new one. So no
check can disturb another, and nothing waits without a limit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipepart.errors import ConfigError, PipelineError, PipepartError
from pipepart.parent import end_with_parent, spawned_tied

if TYPE_CHECKING:
    import torch

    from pipepart.runtime.mesh import Groups
    from pipepart.runtime.transport import Transport

__all__ = ["Answer", "Crew", "CrewFailed", "Crews", "Place", "Settings", "load"]

_START = 180.0  # seconds in which the processes of a crew must be ready
_MOMENT = 10.0  # seconds that the other ranks have to end by themselves, and that a rank has beyond its own time limit
_ATTEMPTS = 3  # crews of one size that may fail to start


@dataclass(frozen=True)
class Settings:
    """What all ranks of a self-test know."""

    kind: str
    """The type of the devices."""
    timeout: float
    """Seconds that one check may take."""
    quick: bool
    libraries: tuple[str, ...]
    """Modules to import first: libraries of devices that torch does not load by itself."""
    cache: str
    """A folder for measured costs, which all crews share."""
    logs: str


class CrewFailed(PipelineError):
    """A rank raised, ended or took too long. The message is the first cause."""


@dataclass(frozen=True)
class Answer:
    """What became of one rank in a check."""

    rank: int
    when: float
    ok: bool
    value: Any
    """The result of the function, or the text of the failure."""


@dataclass
class Place:
    """A rank of a crew: its device, its groups and its transports, which are made when a check needs them."""

    rank: int
    size: int
    device: torch.device
    settings: Settings
    _transports: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def limit(self) -> timedelta:
        return timedelta(seconds=self.settings.timeout)

    @cached_property
    def host(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @cached_property
    def host_groups(self) -> Groups:
        """The groups of one pipeline of all ranks, for tensors in host memory."""
        return self._groups(self.host)

    @cached_property
    def device_groups(self) -> Groups:
        """The groups of one pipeline of all ranks, for tensors on the devices."""
        return self.host_groups if self.device == self.host else self._groups(self.device)

    def _groups(self, device: torch.device) -> Groups:
        from pipepart.runtime.mesh import Groups, Mesh

        return Groups.create(Mesh(1, self.size), self.limit, device)

    def transport(self, name: str, device: torch.device) -> Transport:
        """Return the transport with this name for tensors on `device`. All ranks must call it."""
        from pipepart.runtime.transport import choose_transport

        key = name, device.type
        if key not in self._transports:
            groups = self.host_groups if device == self.host else self.device_groups
            made = choose_transport(name, groups, device, self.settings.timeout)
            made.open([(a, b) for a in range(self.size) for b in range(self.size) if a != b])
            self._transports[key] = made
        return self._transports[key]

    @property
    def pipeline_options(self) -> dict[str, Any]:
        """The options of a `Pipeline` on the device of this rank."""
        return {"timeout": self.settings.timeout, "device": self.device.type}

    def meet(self) -> None:
        """Wait for all ranks, in host memory."""
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier(group=self.host_groups.world)


class Crew:
    """The processes of one job, which run one function after the other."""

    def __init__(self, size: int, settings: Settings) -> None:
        from pipepart.runtime.rendezvous import job_folder

        self.size, self.settings = size, settings
        self.used = False
        context = get_context("spawn")
        self._open, self.processes, self._connections = ExitStack(), [], []
        try:
            self._open.enter_context(job_folder())
            with spawned_tied():
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    log = os.path.join(settings.logs, f"ranks-{size}-rank-{rank}.txt")
                    process = context.Process(
                        target=_work, args=(theirs, rank, size, settings, log, os.getpid()), daemon=True
                    )
                    process.start()
                    theirs.close()
                    self.processes.append(process)
                    self._connections.append(ours)
            answers = self.collect(_START)
        except BaseException:
            self.close()
            raise
        if not all(answer.ok for answer in answers):
            self.close()
            raise CrewFailed(f"the processes did not start: {first_cause(answers)}")

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of `function(place, *args)` of all ranks; raise the first cause if one fails."""
        answers = self.answers(function, *args)
        if not all(answer.ok for answer in answers):
            self.close()
            raise CrewFailed(first_cause(answers))
        return [answer.value for answer in answers]

    def answers(self, function: Callable[..., Any], *args: Any) -> list[Answer]:
        """Call `function(place, *args)` on all ranks, and return what became of each."""
        self.used = True
        for connection in self._connections:
            with suppress(OSError):  # the rank has ended, which `collect` reports
                connection.send((function, args))
        return self.collect(self.settings.timeout)

    def collect(self, limit: float) -> list[Answer]:
        """Wait for an answer of every rank. Beyond `limit`, and after the first failure, ranks have a moment to answer."""
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + limit + _MOMENT
        while len(found) < self.size:
            open_ones = {self._connections[rank]: rank for rank in range(self.size) if rank not in found}
            ready = wait(list(open_ones), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = f"did not finish within the time limit of {limit:.0f} s"
                if any(not answer.ok for answer in found.values()):
                    late = f"did not end within {_MOMENT:.0f} s after another rank had failed"
                found.update({rank: Answer(rank, time.time(), False, late) for rank in open_ones.values()})
                break
            for connection in ready:
                rank = open_ones[connection]  # type: ignore[index]
                found[rank] = self._received(rank)
                if not found[rank].ok:
                    deadline = min(deadline, time.monotonic() + _MOMENT)
        return [found[rank] for rank in range(self.size)]

    def _received(self, rank: int) -> Answer:
        try:
            when, ok, value = self._connections[rank].recv()
            return Answer(rank, when, ok, value)
        except (EOFError, OSError):
            when = time.time()
            self.processes[rank].join(1)
            code = self.processes[rank].exitcode
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            return Answer(rank, when, False, f"ended without an answer ({how})")

    def dismiss(self, limit: float) -> list[int]:
        """Let the ranks end by themselves, and return those that have not after `limit` seconds."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + limit
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    def close(self) -> None:
        """End all processes of the crew."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(_MOMENT)
        for connection in self._connections:
            connection.close()
        self._open.close()
        self.size = 0


class Crews:
    """One crew at a time: a check for another number of ranks, or after a failure, starts a new one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._current: Crew | None = None
        self._refused: dict[int, list[str]] = {}

    def of(self, size: int) -> Crew:
        """Return a crew of this size that is ready."""
        if self._current is not None and self._current.size == size:
            return self._current
        refused = self._refused.setdefault(size, [])
        if len(refused) >= _ATTEMPTS:
            raise CrewFailed(refused[-1])
        self.close()
        try:
            self._current = Crew(size, self._settings)
        except CrewFailed as error:
            refused.append(str(error))
            raise
        refused.clear()
        return self._current

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of `function(place, *args)` on `size` ranks."""
        return self.of(size).run(function, *args)

    def close(self) -> None:
        """End the processes of the current crew: they may do so by themselves first."""
        if self._current is not None and self._current.size:
            self._current.dismiss(0.5)
            self._current.close()
        self._current = None


def first_cause(answers: Sequence[Answer]) -> str:
    """Return the text of the rank that failed first. Ranks that only lost another one come last."""

    def order(answer: Answer) -> tuple[bool, bool, float]:
        text = str(answer.value)
        late = "did not " in text
        return late, not late and ("another rank" in text or "lost" in text), answer.when

    first = min((answer for answer in answers if not answer.ok), key=order)
    return f"rank {first.rank}: {first.value}"


def load(libraries: Sequence[str]) -> None:
    """Import the libraries of devices that torch does not load by itself."""
    for name in libraries:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"--import {name}: this module cannot be imported: {error}. Give the name of an installed module."
            ) from error


def _work(connection: Connection, rank: int, size: int, settings: Settings, log: str, parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the ranks
    _write_to(Path(log))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        PIPEPART_CACHE=settings.cache,
    )
    try:
        place = _join(rank, size, settings)
        connection.send((time.time(), True, None))
        while (task := connection.recv()) is not None:
            function, args = task
            connection.send((time.time(), True, function(place, *args)))
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, PipepartError) else _with_place(error)
        with suppress(OSError):
            connection.send((time.time(), False, text))
        # The crew is lost. The parent ends this process; until then the connections of this rank stay open.
        with suppress(EOFError, OSError):
            connection.recv()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the ranks of `pipepart train` end after a failure: no hooks at exit wait for others


def _join(rank: int, size: int, settings: Settings) -> Place:
    import torch.distributed as dist

    from pipepart.devices import backend_for, limit_threads, local_device
    from pipepart.runtime.rendezvous import meeting_store
    from pipepart.runtime.strangers import closed_to_strangers

    load(settings.libraries)
    device = local_device(rank, settings.kind)
    limit_threads(size)
    limit = timedelta(seconds=settings.timeout)
    if size > 1:
        store = meeting_store("127.0.0.1", 0, rank, size, limit, one_host=True)
        with closed_to_strangers():
            dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=size, timeout=limit)
    return Place(rank, size, device, settings)


def _write_to(log: Path) -> None:
    """Send the output of this process, that of libraries in C++ included, to a file."""
    with open(log, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


def _with_place(error: BaseException) -> str:
    """Return an unexpected error with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
