"""What is asked of the planner, and what can be refused before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipepart.errors import PlanError, ScheduleError, did_you_mean
from pipepart.partition import Link
from pipepart.planning.layout import BY_PROCESSOR, LOCAL_LINK, Handling
from pipepart.schedule import SCHEDULES, read_csv

__all__ = ["Recipe", "Request", "ScheduleName", "auto_microbatches", "check_request", "recipes"]

TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "forward")
"""The schedules that the runtime can execute."""

ScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"]
"""Their names, for type checkers and editors."""

AUTO_SLACK = 1
"""One more micro-batch in flight than 1F1B needs absorbs jitter between stages."""

_AUTO_ORDER = ("1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved", "zb_v")
"""What ``auto`` tries, the simplest first: a later one must be clearly better (see `planner.CLEARLY`)."""

_AUTO_CHUNKS = (2, 4)
"""Chunks per stage that ``auto`` tries for schedules that take any number."""


@dataclass(frozen=True)
class Request:
    """What the user asked for; the rest is decided by planning."""

    stages: int
    replicas: int = 1
    microbatches: int = 1
    schedule: str = "auto"
    chunks: int | str = "auto"
    slack: int | str = "auto"
    keep_together: tuple[tuple[str, ...], ...] = ()
    """Groups of module paths that stay in one chunk each."""
    split_at: tuple[str, ...] | None = None
    """Module paths before which a cut lies; as many as there are cuts."""
    link: Link = LOCAL_LINK
    handling: Handling = BY_PROCESSOR
    recompute: bool | str = "auto"
    """True: every chunk; False: none; ``auto``: those that do not fit into memory otherwise."""
    memory_limit: float | None = None
    """Bytes that one device may use; None: as much as it has, where that is known."""
    optimizer_factor: float = 2.0
    """Bytes of optimizer state per byte of parameters: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD."""


@dataclass(frozen=True)
class Recipe:
    """One way to run a pipeline: a schedule with its chunks per stage and its slack."""

    schedule: str
    chunks: int
    slack: int


def check_request(
    schedule: str, microbatches: int | str = "auto", stages: int | str = "auto", recompute: bool | str = "auto"
) -> None:
    """Refuse what can be refused before anything is started."""
    if schedule.endswith(".csv"):
        read_csv(schedule)
    elif schedule != "auto" and schedule not in TRAINING_SCHEDULES:
        if schedule in SCHEDULES:
            raise ScheduleError(
                f"schedule {schedule!r} cannot train here; use one of: {', '.join(TRAINING_SCHEDULES)}, auto"
            )
        raise ScheduleError(
            f"schedule {schedule!r} is not known: {did_you_mean(schedule, (*TRAINING_SCHEDULES, 'auto'))}"
        )
    for name, value in (("microbatches", microbatches), ("stages", stages)):
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanError(f"{name} must be a whole number of at least 1 or 'auto', got {value!r}")
    if recompute != "auto" and not isinstance(recompute, bool):
        raise PlanError(f"recompute must be True, False or 'auto', got {recompute!r}")


def auto_microbatches(stages: int, batch_size: int) -> int:
    """Four micro-batches per stage keep the bubble of a balanced pipeline below a fifth; one stage needs no more than one.

    The rule for when the number must be fixed before anything is measured.
    """
    return max(1, min(batch_size, 4 * stages)) if stages > 1 else 1


def recipes(request: Request) -> list[Recipe]:
    """All that the request allows, the simplest first."""
    found = list(_recipes(request))
    if not found:
        raise PlanError(
            f"no schedule takes chunks={request.chunks}; use schedule='interleaved', or leave chunks to 'auto'"
        )
    return found


def _recipes(request: Request) -> Iterator[Recipe]:
    if request.schedule.endswith(".csv"):
        yield Recipe(request.schedule, read_csv(request.schedule).chunks // request.stages, 0)
        return
    auto = request.schedule == "auto"
    if auto and request.stages == 1 and request.chunks == "auto":
        yield Recipe("1f1b", 1, 0 if request.slack == "auto" else int(request.slack))
        return
    for name in _AUTO_ORDER if auto else (request.schedule,):
        kind = SCHEDULES[name]
        if request.chunks != "auto":
            counts: tuple[int, ...] = (int(request.chunks),)
        elif kind.fixed_chunks is not None or not auto:
            counts = (kind.fixed_chunks or kind.usual_chunks,)
        else:
            counts = _AUTO_CHUNKS if name == "interleaved" else (1,)
        if auto and kind.takes_slack is False and request.slack not in ("auto", 0):
            continue
        if request.slack == "auto":
            slack = AUTO_SLACK if kind.takes_slack and request.stages > 1 else 0
        else:
            slack = int(request.slack)
        for chunks in counts:
            if auto and kind.fixed_chunks not in (None, chunks):
                continue
            if auto and name == "interleaved" and chunks == 1:
                continue
            yield Recipe(name, chunks, slack)
