"""A board in shared memory on which replicas that are jobs of their own show what they have, so that any of them may be lost.

```
FOLDER/                    in /dev/shm, for the user of the job only (the folder of `spare_files`)
    flags-R-N-S            of the rank of stage S, in the N-th start of replica R: steps shown, a replica that joins, busy
    shown-R-N-S            its gradients of the last two steps, each with their weight
    plan.json              the plan of the first replica, which the others follow
    lost                   starts of replicas that have ended; only the command that starts them writes it
    ready-R-N-S, wish      a replica that waits to join: its ranks say so, and the command tells the others
    state-R-N              where the state is that this replica joins with
```
Replicas make no collectives. Each rank shows its gradient, and reads those of the same stage in the other replicas. A replica
takes part in a step if all of its stages have shown theirs. What a lost replica has shown stays readable, and it shows nothing
after it is on the list of the lost ones: so all ranks that are left come to the same result, whenever they look.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipepart.errors import PipelineError

__all__ = [
    "ENDED",
    "LOST",
    "REPLICA",
    "STUCK",
    "Board",
    "Shown",
    "Start",
    "has_shown",
    "read_lists",
    "write_whole_json",
]

REPLICA = "PIPEPART_REPLICA"
"""The variable with the replica of a job, the number of its start, and the number of replicas: ``1/0/2``."""

Start = tuple[int, int]
"""A replica, and the number of its start: a replica that was lost is started again."""
LOST, ENDED = "lost", "ended"
STUCK = "stuck"
"""The file that is there when a rank has waited for its timeout. Then no replica goes on."""

_NUMBER = struct.Struct("<q")
_JOIN = struct.Struct("<qqq")  # after this step, this replica joins, in this start
_FLAGS = 2 * _NUMBER.size + 2 * _JOIN.size  # steps shown; busy; joins after even and after odd steps
_BUSY = _NUMBER.size
_HEAD = struct.Struct("<dqq")  # weight, settings, form
_ALIGNED = 64
_SHORT, _LONGEST = 0.0001, 0.005  # seconds between two looks
_LOOK = 0.05  # seconds between two looks at the list of lost replicas
_BUSIEST = 6 * 3600.0  # seconds in which a rank may write a checkpoint while others wait


def write_whole_json(path: Path, value: Any) -> None:
    """Write a small file that others read at any time."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(value))
    os.replace(unfinished, path)


def read_lists(folder: Path) -> tuple[set[Start], set[int]]:
    """Return the starts that are lost, and the replicas that have ended without a failure."""
    with suppress(OSError):
        found = json.loads((folder / "lost").read_text())
        return {(int(replica), int(start)) for replica, start in found[LOST]}, set(map(int, found[ENDED]))
    return set(), set()


def has_shown(folder: Path, start: Start, stages: int) -> bool:
    """Return whether all ranks of a replica have taken part in a step."""
    for stage in range(stages):
        with suppress(OSError, struct.error):
            if _NUMBER.unpack_from((folder / _flags(start, stage)).read_bytes())[0]:
                continue
        return False
    return True


def _flags(start: Start, stage: int) -> str:
    return f"flags-{start[0]}-{start[1]}-{stage}"


def _opened(path: Path, size: int | None = None) -> mmap.mmap | None:
    """Return the memory of a file, which is made with `size` bytes; None if it is not there yet."""
    try:
        descriptor = os.open(path, os.O_RDWR | (0 if size is None else os.O_CREAT | os.O_EXCL), 0o600)
    except FileNotFoundError:
        return None
    try:
        if size is not None:
            os.posix_fallocate(descriptor, 0, size)  # an error here, not a crash later, if the memory is full
        found = os.fstat(descriptor).st_size
        return mmap.mmap(descriptor, found) if found else None
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Shown:
    """What one replica shows in a step."""

    start: Start
    weight: float
    content: memoryview


class Board:
    """The board of one rank. `stage` of `stages` in its replica; `start` is the replica and the number of its start."""

    def __init__(self, folder: Path, start: Start, replicas: int, stage: int, stages: int, timeout: float) -> None:
        self.folder, self.start, self.replicas = folder, start, replicas
        self.stage, self.stages, self.timeout = stage, stages, timeout
        self.members: dict[int, int] = dict.fromkeys(range(replicas), 0)
        """The replicas that take part in the next step, each with the number of its start."""
        self.step = 0
        """The number of the next step in which gradients are combined, the same on all ranks."""
        self.joining: Start | None = None
        """The replica that joins after the last step, and takes part in the next one."""
        self.changed: Callable[[str], None] = lambda text: None
        """Told when replicas leave or join."""
        self._maps: dict[str, mmap.mmap] = {}
        self._own = _opened(folder / _flags(start, stage), _FLAGS)
        self._data: mmap.mmap | None = None
        self._half = 0

    # ---- joining

    def ready(self) -> None:
        """Say that this rank waits to join."""
        (self.folder / f"ready-{self.start[0]}-{self.start[1]}-{self.stage}").touch()

    def invite(self, state: str) -> None:
        """Tell the replica that joins where the state is; the first stage of the donor calls it."""
        assert self.joining is not None
        content = {"state": state, "step": self.step, "members": list(self.members.items())}
        write_whole_json(self.folder / "state-{}-{}".format(*self.joining), content)

    def accept(self) -> str:
        """Wait for the state with which this replica joins. Returns its name."""
        path = self.folder / "state-{}-{}".format(*self.start)
        self.await_files(path.exists)
        assert self._own is not None
        _NUMBER.pack_into(
            self._own, _BUSY, 1
        )  # until it shows its first step: the others wait while it reads the state
        found = json.loads(path.read_text())
        self.step, self.joining = int(found["step"]), self.start
        self.members = {int(replica): int(start) for replica, start in found["members"]}
        return str(found["state"])

    @staticmethod
    def await_files(there: Callable[[], bool]) -> None:
        """Wait until files of another replica are there, without a limit: the command ends this process if they cannot come."""
        while not there():
            time.sleep(_LOOK)

    @property
    def donor(self) -> int:
        """The first of the replicas that had the last step: it gives its state to one that joins, and writes checkpoints."""
        return min(replica for replica in self.members if (replica, self.members[replica]) != self.joining)

    def _propose(self) -> None:
        """Let a replica that is ready join after this step. Only the first stage of the first replica of those here does."""
        if self.stage or min(self.members) != self.start[0]:
            return
        with suppress(OSError, ValueError):
            wish = json.loads((self.folder / "wish").read_text())
            joining = int(wish["replica"]), int(wish["start"])
            if joining[0] not in self.members and joining not in read_lists(self.folder)[0]:
                assert self._own is not None
                _JOIN.pack_into(self._own, self._place_of_join(), self.step, *joining)

    def _place_of_join(self) -> int:
        """Return where the note on a join after this step is. Others may still read that of the step before."""
        return 2 * _NUMBER.size + self.step % 2 * _JOIN.size

    # ---- one step

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, this rank does something that may take long, such as writing a checkpoint, and others wait for it."""
        assert self._own is not None
        _NUMBER.pack_into(self._own, _BUSY, 1)
        try:
            yield
        finally:
            _NUMBER.pack_into(self._own, _BUSY, 0)

    def show(self, weight: float, settings: int, form: int, size: int, write: Callable[[memoryview], None]) -> None:
        """Show the gradient of this rank in this step. `write` writes it into memory of `size` bytes.

        The memory of the step before the last one is used again: whoever has shown the last step has read it.
        """
        half = _ALIGNED + -(-size // _ALIGNED) * _ALIGNED
        if self._data is None:
            name = "shown-{}-{}-{}".format(*self.start, self.stage)
            self._data, self._half = _opened(self.folder / name, 2 * half), half
        assert self._data is not None and self._own is not None
        if half != self._half:
            raise PipelineError(
                f"the gradients of stage {self.stage} have {size} bytes, and had {self._half - _ALIGNED} before: a run that "
                "may lose replicas keeps its parameters. Do not add or replace any."
            )
        begin = self.step % 2 * half
        _HEAD.pack_into(self._data, begin, weight, settings, form)
        write(memoryview(self._data)[begin + _ALIGNED : begin + half])
        self._propose()
        _NUMBER.pack_into(self._own, _BUSY, 0)
        _NUMBER.pack_into(self._own, 0, self.step + 1)

    def gather(self, settings: int, form: int) -> list[Shown]:
        """Wait until all replicas have shown this step or are lost; return what those of them have shown that take part.

        Then the step is over, and a replica that joins is among the members of the next one.
        """
        taking = self._taking()
        shown = []
        for start in taking:
            data = self._map("shown-{}-{}-{}".format(*start, self.stage))
            assert data is not None
            half = len(data) // 2
            begin = self.step % 2 * half
            weight, others_settings, others_form = _HEAD.unpack_from(data, begin)
            self._compare(start, others_settings == settings, others_form == form)
            shown.append(Shown(start, weight, memoryview(data)[begin + _ALIGNED : begin + half]))
        self._follow(taking)
        return shown

    def _compare(self, other: Start, same_settings: bool, same_form: bool) -> None:
        if same_settings and same_form:
            return
        what = "other parameters" if same_settings else "other learning rates, or another step of the optimizer"
        raise PipelineError(
            f"replica {other[0]} has {what} than replica {self.start[0]} in step {self.step}: replicas that may be lost decide "
            "alone, each on its own samples. Let callbacks and schedulers follow values of validation, which all replicas "
            "compute on the same samples, or use launcher.lost_replica=null."
        )

    def _taking(self) -> list[Start]:
        """Return the replicas that take part in this step, in one order on all ranks."""
        decided: dict[int, bool] = {}

        def all_decided() -> bool:
            lost, ended = read_lists(self.folder)  # before the flags: a lost replica shows nothing afterwards
            if self.start in lost:
                raise PipelineError(f"replica {self.start[0]} was given up, and goes on without this process")
            for replica, number in self.members.items():
                start = replica, number
                if self._has_shown(start):
                    decided[replica] = True
                elif start in lost:
                    decided[replica] = False
                elif replica in ended:
                    raise PipelineError(
                        f"replica {replica} has ended its training, and replica {self.start[0]} has not: replicas that may be "
                        "lost decide alone. Let callbacks follow values of validation, or use launcher.lost_replica=null."
                    )
            return len(decided) == len(self.members)

        self._until(all_decided, lambda: self._missing(decided), self._any_busy)
        return [(replica, number) for replica, number in sorted(self.members.items()) if decided[replica]]

    def _has_shown(self, start: Start) -> bool:
        for stage in range(self.stages):
            flags = self._map(_flags(start, stage))
            if flags is None or _NUMBER.unpack_from(flags)[0] <= self.step:
                return False
        return True

    def _missing(self, decided: Mapping[int, bool]) -> str:
        missing = [
            f"replica {replica} stage {stage}"
            for replica, number in self.members.items()
            if replica not in decided
            for stage in range(self.stages)
            if (flags := self._map(_flags((replica, number), stage))) is None
            or _NUMBER.unpack_from(flags)[0] <= self.step
        ]
        return f"the gradients of step {self.step} of {', '.join(missing)}"

    def _any_busy(self) -> bool:
        """Return whether a rank of another replica does something that may take long."""
        flags = (
            self._map(_flags((replica, number), stage))
            for replica, number in self.members.items()
            for stage in range(self.stages)
        )
        return any(one is not None and _NUMBER.unpack_from(one, _BUSY)[0] for one in flags)

    def _follow(self, taking: Sequence[Start]) -> None:
        """Note who takes part in the next step: those who have taken part in this one, and a replica that joins."""
        gone = sorted(set(self.members) - {replica for replica, _ in taking})
        first, self.joining = min(self.members), None
        note = self._map(_flags((first, self.members[first]), 0)) if first not in gone else None
        after, *joining = (-1, 0, 0) if note is None else _JOIN.unpack_from(note, self._place_of_join())
        self.members = dict(taking)
        for number in gone:
            self.changed(f"replica {number} is lost; step {self.step} has the samples of {_named(self.members)}")
        if joining[1] and after == self.step:
            self.joining = joining[0], joining[1]
            self.members = dict(sorted({**self.members, joining[0]: joining[1]}.items()))
            self.changed(f"replica {joining[0]} is back, with the state of replica {self.donor} after step {self.step}")
        self.step += 1

    # ---- waiting

    def _map(self, name: str) -> mmap.mmap | None:
        found = self._maps.get(name)
        if found is None:
            found = _opened(self.folder / name)
            if found is not None:
                self._maps[name] = found
        return found

    def _until(
        self, done: Callable[[], bool], what: Callable[[], str], may_wait: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until `done`, for the timeout at most; time in which others `may_wait` long does not count."""
        pause, begun, first = _SHORT, time.monotonic(), time.monotonic()
        while not done():
            time.sleep(pause)
            pause, now = min(2 * pause, _LONGEST), time.monotonic()
            if may_wait() and now - first < _BUSIEST:
                begun = now
            if now - begun > self.timeout:
                (self.folder / STUCK).touch()
                raise PipelineError(
                    f"replica {self.start[0]} stage {self.stage} has waited {self.timeout:.0f} s for {what()}: stopped, stuck, "
                    "or still computing. If they are computing, set a larger timeout."
                )


def _named(members: Mapping[int, int]) -> str:
    numbers = ", ".join(map(str, sorted(members)))
    return f"replica {numbers}" if len(members) == 1 else f"replicas {numbers}"
