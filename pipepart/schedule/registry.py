"""The schedules by name, or from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pipepart.errors import ScheduleError, did_you_mean
from pipepart.schedule.actions import Schedule
from pipepart.schedule.generators import forward_only, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zb_v
from pipepart.schedule.torch_csv import read_csv

__all__ = ["SCHEDULES", "ScheduleKind", "make_schedule"]


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


SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        "gpipe": ScheduleKind("gpipe", gpipe, "all forwards, then all backwards"),
        "1f1b": ScheduleKind(
            "1f1b", one_f_one_b, "one forward, one backward in turn: p - i activations at stage i",
            fixed_chunks=1, takes_slack=True,
        ),
        "interleaved": ScheduleKind(
            "interleaved", interleaved, "1f1b over several chunks per stage: the bubble divided by their number",
            usual_chunks=2,
        ),
        "zb_h1": ScheduleKind(
            "zb_h1", zb_h1, "backward split, weights held back: p activations on every stage",
            fixed_chunks=1, splits_backward=True,
        ),
        "zb_h2": ScheduleKind(
            "zb_h2", zb_h2, "backward split, more micro-batches in flight: 2p - 1 activations on every stage",
            fixed_chunks=1, splits_backward=True,
        ),
        "zb_v": ScheduleKind(
            "zb_v", zb_v, "backward split, two chunks per stage placed in a V: p activations on every stage",
            fixed_chunks=2, splits_backward=True,
        ),
        "forward": ScheduleKind("forward", forward_only, "forwards alone, for evaluation"),
    }
)  # fmt: skip
"""All schedules with a fixed rule, by name."""


def make_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    slack: int = 0,
    placement: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of that name, or the one in a file (a name that ends in ``.csv``).

    ``chunks`` is per stage; the default depends on the schedule. ``placement`` (the stage of each chunk) is for
    ``forward``, to evaluate over the chunks of a training schedule with any placement.
    """
    if name not in SCHEDULES and not name.endswith(".csv"):
        known = did_you_mean(name, SCHEDULES)
        raise ScheduleError(f"schedule {name!r} is not known: {known}, or a file that ends in .csv")
    kind = SCHEDULES.get(name)
    if kind is not None and chunks is None:
        chunks = kind.fixed_chunks or kind.usual_chunks
    for what, value, least in (
        ("stages", stages, 1),
        ("microbatches", microbatches, 1),
        ("chunks", 1 if chunks is None else chunks, 1),
        ("slack", slack, 0),
    ):
        if not isinstance(value, int) or value < least:
            raise ScheduleError(f"schedule {name!r}: {what} is {value!r}; expected a whole number >= {least}")
    if slack and (kind is None or not kind.takes_slack):
        takers = ", ".join(k.name for k in SCHEDULES.values() if k.takes_slack)
        raise ScheduleError(f"schedule {name!r} takes no slack, got slack={slack}; those that do: {takers}")
    if placement is not None:
        if name != "forward":
            raise ScheduleError(f"schedule {name!r} places its chunks itself; only 'forward' takes a placement")
        if sorted(set(placement)) != list(range(stages)):
            raise ScheduleError(f"placement {tuple(placement)}: expected every stage 0..{stages - 1} to hold a chunk")
    if kind is None:
        return _from_file(name, stages, microbatches, chunks)
    if kind.fixed_chunks is not None and chunks != kind.fixed_chunks:
        other = "'interleaved' takes any number" if kind.fixed_chunks == 1 else "leave chunks out"
        raise ScheduleError(f"schedule {name!r} has {kind.fixed_chunks} chunks per stage, got {chunks}; {other}")
    options: dict[str, object] = {"chunks": chunks} if kind.fixed_chunks is None else {}
    options |= {"slack": slack} if kind.takes_slack else {}
    options |= {"placement": placement} if placement is not None else {}
    return kind.build(stages, microbatches, **options)


def _from_file(path: str, stages: int, microbatches: int, chunks: int | None) -> Schedule:
    schedule = read_csv(path)
    wanted = (("stages", stages, schedule.stages), ("micro-batches", microbatches, schedule.microbatches))
    for what, asked, found in wanted:
        if asked != found:
            raise ScheduleError(f"schedule file {path!r} is for {found} {what}, asked for {asked}")
    if chunks is not None and chunks * stages != schedule.chunks:
        raise ScheduleError(
            f"schedule file {path!r} has {schedule.chunks} chunks, asked for {chunks} on each of {stages} stages"
        )
    return schedule
