"""The registry of schedules: their names and options, and `make_schedule`, which makes one by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipepart.errors import ScheduleError, did_you_mean
from pipepart.schedule.actions import Action, Schedule
from pipepart.schedule.chunk_costs import ChunkCosts
from pipepart.schedule.torch_csv import read_csv

__all__ = ["SCHEDULES", "ScheduleKind", "make_schedule", "named", "schedule_of"]


@dataclass(frozen=True)
class ScheduleKind:
    """A named schedule: its generator and its options."""

    name: str
    build: Callable[..., Schedule]
    """Generator; takes stages and micro-batches, chunks per stage if they are free, and slack if it takes slack."""
    summary: str
    usual_chunks: int = 1
    fixed_chunks: int | None = None
    """The only possible number of chunks per stage; None: any."""
    takes_slack: bool = False
    splits_backward: bool = False
    takes_costs: bool = False
    """Whether the order of actions depends on the times of the chunks."""


_KINDS: dict[str, ScheduleKind] = {}
SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(_KINDS)
"""All schedules with a fixed rule, by name."""

Generator = Callable[..., Schedule]


def named(name: str, summary: str, **options: Any) -> Callable[[Generator], Generator]:
    """Register a generator in `SCHEDULES`; ``options`` are fields of `ScheduleKind`."""

    def register(build: Generator) -> Generator:
        _KINDS[name] = ScheduleKind(name, build, summary, **options)
        return build

    return register


def make_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    slack: int = 0,
    placement: Sequence[int] | None = None,
    costs: ChunkCosts | None = None,
) -> Schedule:
    """The schedule of that name, or the one in a file (a name that ends in ``.csv``).

    ``chunks`` is per stage; the default depends on the schedule. ``placement`` (the stage of each chunk) is for
    ``forward``, to evaluate over the chunks of a training schedule with any placement. ``costs`` are for schedules that
    are searched (`ScheduleKind.takes_costs`), and ignored by the others; without them, F = I = W.
    """
    if name not in SCHEDULES and not name.endswith(".csv"):
        known = did_you_mean(name, SCHEDULES)
        raise ScheduleError(f"schedule {name!r} is not known: {known}, or a file that ends in .csv")
    kind = SCHEDULES.get(name)
    if kind is not None and chunks is None:
        chunks = kind.fixed_chunks or kind.usual_chunks
    numbers = {
        "stages": stages,
        "microbatches": microbatches,
        "chunks": 1 if chunks is None else chunks,
        "slack": slack,
    }
    for what, value in numbers.items():
        least = 0 if what == "slack" else 1
        if not isinstance(value, int) or value < least:
            raise ScheduleError(f"schedule {name!r}: {what} is {value!r}; expected a whole number >= {least}")
    if slack and (kind is None or not kind.takes_slack):
        takers = ", ".join(k.name for k in SCHEDULES.values() if k.takes_slack)
        raise ScheduleError(f"schedule {name!r} takes no slack, got slack={slack}; schedules that do: {takers}")
    if placement is not None:
        if name != "forward":
            raise ScheduleError(f"schedule {name!r} places its chunks itself; only 'forward' takes a placement")
        if sorted(set(placement)) != list(range(stages)):
            raise ScheduleError(f"placement {tuple(placement)}: expected every stage 0..{stages - 1} to hold a chunk")
    if kind is None:
        return read_csv(name, stages=stages, microbatches=microbatches, chunks=chunks)
    if kind.fixed_chunks is not None and chunks != kind.fixed_chunks:
        other = "'interleaved' takes any number" if kind.fixed_chunks == 1 else "leave chunks out"
        raise ScheduleError(f"schedule {name!r} takes chunks={kind.fixed_chunks} per stage, got {chunks}; {other}")
    options: dict[str, object] = {"chunks": chunks} if kind.fixed_chunks is None else {}
    options |= {"slack": slack} if kind.takes_slack else {}
    options |= {"placement": placement} if placement is not None else {}
    if kind.takes_costs:
        options["costs"] = ChunkCosts.even(stages, chunks or 1) if costs is None else costs
    return kind.build(stages, microbatches, **options)


def schedule_of(
    name: str, stages: int, microbatches: int, placement: Sequence[int], actions: Callable[[int], Iterable[Action]]
) -> Schedule:
    """The schedule with these actions of each stage."""
    return Schedule(name, stages, microbatches, tuple(placement), tuple(tuple(actions(s)) for s in range(stages)))
