"""Schedules in files: the CSV format of `torch.distributed.pipelining`, one row per stage, one action per cell.

A cell is chunk, kind, micro-batch: ``2F0``, ``2B0``, ``2I0``, ``2W0``; an empty cell is a pause. With messages also
``2SEND_F0``, ``3RECV_F0``, ``3SEND_B0``, ``2RECV_B0``, always between neighbouring chunks. A stage of torch is a chunk
here, and a rank of torch is a stage. ``(0F3;7B1)OVERLAP_F_B`` is read as its parts, one after the other.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipepart.errors import ScheduleError
from pipepart.files import read_text
from pipepart.schedule.actions import COMPUTE, Action, Schedule
from pipepart.schedule.validate import compute_of, validate
from pipepart.values import shortened

__all__ = ["from_csv", "program_to_csv", "read_csv", "read_program", "to_csv", "write_csv", "write_program"]

_CELL = re.compile(r"(\d{1,12})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,12})")
_IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def _actions(cell: str, where: str) -> Iterator[Action]:
    """The actions of one cell."""
    cell = cell.strip()
    if not cell or _IGNORED.fullmatch(cell):
        return
    overlap = _OVERLAP.fullmatch(cell)
    if overlap and "(" not in overlap[1]:
        for part in overlap[1].split(";"):
            yield from _actions(part, where)
        return
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ScheduleError(
            f"{where}: {shortened(cell)} is not an action; expected chunk, kind and micro-batch such as 2F0, 2B0, 2I0, 2W0, "
            "2SEND_F0 or 3RECV_F0"
        )
    chunk, kind, k = int(found[1]), found[2], int(found[3])
    if kind in COMPUTE:
        yield Action(kind, chunk, k)
        return
    what, payload = kind.split("_")
    peer = chunk + 1 if (what == "SEND") == (payload == "F") else chunk - 1
    yield Action(what, chunk, k, peer, payload)


def _parse(text: str, where: str) -> tuple[tuple[Action, ...], ...]:
    try:
        rows = [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise ScheduleError(f"{where} cannot be read: {error}") from error
    if not rows:
        raise ScheduleError(f"{where} is empty; expected one row of actions per stage")
    parsed = tuple(
        tuple(action for c, cell in enumerate(row, 1) for action in _actions(cell, f"{where}, row {r}, cell {c}"))
        for r, row in enumerate(rows, 1)
    )
    _check_numbers([action for actions in parsed for action in actions], where)
    return parsed


def _check_numbers(actions: Sequence[Action], where: str) -> None:
    """Refuse chunks and micro-batches with numbers that the actions cannot fill, before tables of that size are made."""
    chunk = max((action.chunk for action in actions), default=0)
    microbatch = max((action.microbatch for action in actions), default=0)
    if (chunk + 1) * (microbatch + 1) > 8 * len(actions) + 1024:
        raise ScheduleError(
            f"{where} names chunk {chunk} and micro-batch {microbatch}, which needs an action for each of "
            f"{(chunk + 1) * (microbatch + 1)} pairs of them, but it has {len(actions)} actions; both are counted from 0"
        )


def read_program(path: str | Path) -> tuple[tuple[Action, ...], ...]:
    """All actions of each stage in a file, including messages, without validation (see `validate_program`)."""
    return _parse(read_text(path, ScheduleError), f"schedule file {shortened(str(path), 300)}")


def from_csv(text: str, name: str = "csv") -> Schedule:
    """The validated schedule in a text. SEND and RECV in it are ignored: messages follow from the schedule."""
    schedule = compute_of(_parse(text, f"schedule {name!r}"), name)
    validate(schedule)
    return schedule


def read_csv(
    path: str | Path, *, stages: int | None = None, microbatches: int | None = None, chunks: int | None = None
) -> Schedule:
    """The validated schedule in a file, named after the file (see `from_csv`).

    Raises an error if it is for another number of stages, micro-batches, or chunks per stage than asked for.
    """
    schedule = compute_of(read_program(path), Path(path).stem)
    validate(schedule)
    for what, asked, found in (
        ("stages", stages, schedule.stages),
        ("micro-batches", microbatches, schedule.microbatches),
    ):
        if asked is not None and asked != found:
            raise ScheduleError(f"schedule file {str(path)!r} is for {found} {what}; expected {asked}")
    if chunks is not None and chunks * schedule.stages != schedule.chunks:
        raise ScheduleError(
            f"schedule file {str(path)!r} has {schedule.chunks} chunks; expected {chunks} on each of "
            f"{schedule.stages} stages"
        )
    return schedule


def _cell(action: Action) -> str:
    if action.kind in COMPUTE:
        return f"{action.chunk}{action.kind}{action.microbatch}"
    if action.kind == "REDUCE":
        return f"{action.chunk}REDUCE_GRAD"
    assert action.peer is not None
    if abs(action.peer - action.chunk) != 1:
        raise ScheduleError(f"{action} passes over a chunk; torch's CSV format only has messages between neighbours")
    return f"{action.chunk}{action.kind}_{action.payload}{action.microbatch}"


def program_to_csv(program: Iterable[Sequence[Action]]) -> str:
    """All actions of every stage, messages included (torch's ``compute_comms`` format)."""
    return "".join(",".join(map(_cell, actions)) + "\n" for actions in program)


def to_csv(schedule: Schedule) -> str:
    """The compute actions of every stage (torch's ``compute_only`` format); `from_csv` gives them back."""
    return program_to_csv(schedule.actions)


def write_program(program: Iterable[Sequence[Action]], path: str | Path) -> None:
    """Write `program_to_csv` to a file."""
    Path(path).write_text(program_to_csv(program))


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write `to_csv` to a file."""
    Path(path).write_text(to_csv(schedule))
