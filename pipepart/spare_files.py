"""The folder in memory in which a host keeps parts of the state of a run, its own and those of a neighbour.

```
FOLDER/                       in /dev/shm where there is one, for the user of the job only
    owner                     locked as long as the command of this host runs
    step-000000120-5f3a.../   one state of the run: after this step, by this start of the ranks
        part-0-of-4           of each stage (or rank): values of the model and of the optimizers; that of rank 0 has the rest
        part-1-of-4
```
A state is whole if its parts are there, on any of the hosts.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = [
    "SPARE_FOLDER",
    "is_spare",
    "listed",
    "name_of",
    "newest_whole",
    "part_name",
    "parts_of",
    "spare_folder",
    "step_of",
]

SPARE_FOLDER = "PIPEPART_SPARE_FOLDER"
"""The variable with the folder of this host."""
_PREFIX = "pipepart-spare-"
_MEMORY = "/dev/shm"
_STATE = re.compile(r"step-(\d{9,12})-[0-9a-f]{8}")
_PART = re.compile(r"part-(\d{1,6})-of-(\d{1,6})")
_LONGEST = 1_000_000  # characters of a list


@contextmanager
def spare_folder() -> Iterator[Path]:
    """Make the folder of this host for a run, and remove it afterwards, and those of commands that were killed."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()
    _remove_left(Path(memory))
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=memory))
    before = os.environ.get(SPARE_FOLDER)
    with open(folder / "owner", "w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        os.environ[SPARE_FOLDER] = str(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.environ.pop(SPARE_FOLDER, None)
            if before is not None:
                os.environ[SPARE_FOLDER] = before


def _remove_left(memory: Path) -> None:
    """Remove folders of this user whose command has ended: nobody holds their lock."""
    for folder in memory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.geteuid():
                continue
            with open(folder / "owner") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def is_spare(path: object) -> bool:
    """Whether a checkpoint is a state in the memory of the hosts."""
    place = Path(str(path))
    return place.parent.name.startswith(_PREFIX) and _STATE.fullmatch(place.name) is not None


def name_of(step: int, start: str) -> str:
    """The name of a state; `start` is a random number of the start of the ranks, of 8 hexadecimal digits."""
    return f"step-{step:09}-{start}"


def step_of(name: str) -> int:
    found = _STATE.fullmatch(name)
    assert found is not None
    return int(found.group(1))


def part_name(number: int, count: int) -> str:
    return f"part-{number}-of-{count}"


def parts_of(state: Path) -> list[str]:
    """The parts of a state on this host."""
    with suppress(OSError):
        return sorted(name for name in os.listdir(state) if _PART.fullmatch(name))
    return []


def listed(folder: Path) -> str:
    """The states and parts on this host, as a line of text for the other hosts."""
    with suppress(OSError):
        return json.dumps({path.name: parts_of(path) for path in folder.iterdir() if _STATE.fullmatch(path.name)})
    return ""


def newest_whole(lists: Sequence[str]) -> str:
    """The newest state of which the hosts with these lists have all parts together; empty if there is none."""
    found: dict[str, set[str]] = {}
    for text in lists:
        for name, parts in _read(text).items():
            found.setdefault(name, set()).update(parts)
    whole = [name for name, parts in found.items() if _is_whole(parts)]
    return max(whole, key=step_of, default="")


def _is_whole(parts: set[str]) -> bool:
    places = [(int(m[1]), int(m[2])) for part in parts if (m := _PART.fullmatch(part))]
    counts = {count for _, count in places}
    return len(counts) == 1 and {number for number, _ in places} == set(range(counts.pop()))


def _read(text: str) -> Mapping[str, list[str]]:
    """The list of a host; empty if the text is none."""
    with suppress(ValueError):
        found = json.loads(text) if text and len(text) < _LONGEST else {}
        if isinstance(found, dict):
            return {
                name: [part for part in parts if isinstance(part, str)]
                for name, parts in found.items()
                if _STATE.fullmatch(name) and isinstance(parts, list)
            }
    return {}
