"""The request to the planner, and refusals of requests before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipepart.cost.cluster import Cluster
from pipepart.errors import PlanError, ScheduleError, did_you_mean
from pipepart.partition import Link
from pipepart.planning.layout import BY_PROCESSOR, LOCAL_LINK, Handling, Layout
from pipepart.schedule import SCHEDULES, read_csv

__all__ = [
    "PER_STAGE",
    "MicrobatchCount",
    "PlanRequest",
    "Recipe",
    "ScheduleName",
    "Shape",
    "auto_microbatches",
    "check_request",
    "even_count",
    "neighbouring_counts",
    "recipes",
]

TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "forward")
"""The schedules that the runtime can execute."""

ScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"]
"""Their names, for type checkers and editors."""

PER_STAGE = (1, 2, 4, 8)
"""Micro-batches per stage that are tried."""

_USUAL_PER_STAGE = 4
"""The number where it must be fixed before anything is measured."""

AUTO_SLACK = 1
"""One more micro-batch in flight than 1F1B needs absorbs jitter between stages."""

_AUTO_ORDER = ("1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved", "zb_v")
"""The schedules that ``auto`` tries, the simplest first."""

_AUTO_CHUNKS = (2, 4)
"""Chunks per stage that ``auto`` tries for schedules that take any number."""


@dataclass(frozen=True)
class MicrobatchCount:
    """A number of micro-batches for the batch of a replica, and their size."""

    microbatches: int
    size: int
    """Samples of the largest micro-batch."""


@dataclass(frozen=True)
class Shape:
    """One point of the search space: a mesh and a number of micro-batches."""

    stages: int
    replicas: int
    microbatches: int
    size: int
    """Samples of the largest micro-batch."""


@dataclass(frozen=True)
class PlanRequest:
    """A request to the planner: everything that is fixed, and ``"auto"`` for everything that the search decides.

    The mesh is searched on ``devices``, or ``stages`` and ``replicas`` fix it; a fixed mesh is a search space of one
    point.
    """

    batch_size: int
    """Samples of one step over all replicas, or of each replica (see `each_replica`)."""
    devices: int | None = None
    """Number of devices; None: as many as the fixed mesh needs."""
    cluster: Cluster | None = None
    """The devices and their links; None: equal devices that are joined by `link`."""
    stages: int | str = "auto"
    replicas: int | str = "auto"
    microbatches: int | str = "auto"
    counts: tuple[MicrobatchCount, ...] = ()
    """The numbers of micro-batches that are tried, the usual one first: another must be clearly faster. Empty: the search
    makes them from `microbatches`, and none is preferred."""
    each_replica: bool = False
    """`batch_size` is that of each replica; meshes are then compared by the seconds of a step for as many samples."""
    schedule: str = "auto"
    chunks: int | str = "auto"
    slack: int | str = "auto"
    keep_together: tuple[tuple[str, ...], ...] = ()
    """Groups of module paths that stay in one chunk each."""
    split_at: tuple[str, ...] | None = None
    """Module paths before which a cut lies. If the schedule has more chunks, the planner chooses the other cuts."""
    link: Link = LOCAL_LINK
    handling: Handling = BY_PROCESSOR
    recompute: bool | str = "auto"
    """True: every chunk; False: none; ``auto``: those that do not fit into memory otherwise."""
    memory_limit: float | None = None
    """Bytes that one device may use; None: as much as it has, where that is known."""
    optimizer_factor: float = 2.0
    """Bytes of optimizer state per byte of parameters: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise PlanError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.devices is None and "auto" in (self.stages, self.replicas):
            raise PlanError(
                "a request without a number of devices fixes the mesh: expected whole numbers of stages and replicas, "
                f"got stages={self.stages!r}, replicas={self.replicas!r}"
            )

    @property
    def device_count(self) -> int:
        return int(self.stages) * int(self.replicas) if self.devices is None else self.devices

    def share(self, replicas: int) -> int:
        """Samples of one replica."""
        return self.batch_size if self.each_replica else max(1, -(-self.batch_size // replicas))

    def weight(self, replicas: int) -> float:
        """Factor by which the seconds of a step are multiplied to compare meshes."""
        return 1.0 / replicas if self.each_replica else 1.0

    def layout(self, stages: int, replicas: int) -> Layout:
        """The devices under a mesh."""
        if self.cluster is not None:
            return Layout.on(self.cluster, stages, replicas, memory_limit=self.memory_limit)
        limit = math.inf if self.memory_limit is None else self.memory_limit
        return Layout.uniform(stages, replicas, memory=limit, link=self.link, handling=self.handling)

    def device_memory(self) -> tuple[float, float]:
        """Bytes of the smallest and of the largest device, as far as they may be used."""
        limit = math.inf if self.memory_limit is None else self.memory_limit
        sizes = [limit] if self.cluster is None else [min(limit, kind.memory) for kind in self.cluster.devices]
        return min(sizes), max(sizes)


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
    return max(1, min(batch_size, _USUAL_PER_STAGE * stages)) if stages > 1 else 1


def even_count(samples: int, count: int) -> MicrobatchCount:
    """At most so many micro-batches, all of one size but the last."""
    size = -(-samples // min(count, samples))
    return MicrobatchCount(-(-samples // size), size)


def neighbouring_counts(stages: int, samples: int, usual: int) -> list[MicrobatchCount]:
    """The next smaller and the next larger number of micro-batches than the usual one, whose size is given.

    Those that are worth a measurement before a run.
    """
    at = PER_STAGE.index(_USUAL_PER_STAGE)
    found = []
    for way in (PER_STAGE[:at][::-1], PER_STAGE[at + 1 :]):
        counts = [even_count(samples, each * stages) for each in way]
        found += [count for count in counts if count.size != usual][:1]
    return found


def recipes(request: PlanRequest, stages: int) -> list[Recipe]:
    """All that the request allows on so many stages, the simplest first."""
    found = list(_recipes(request, stages))
    if not found:
        raise PlanError(
            f"no schedule takes chunks={request.chunks}; use schedule='interleaved', or leave chunks to 'auto'"
        )
    return found


def _recipes(request: PlanRequest, stages: int) -> Iterator[Recipe]:
    if request.schedule.endswith(".csv"):
        yield Recipe(request.schedule, read_csv(request.schedule).chunks // stages, 0)
        return
    auto = request.schedule == "auto"
    if auto and stages == 1 and request.chunks == "auto":
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
            slack = AUTO_SLACK if kind.takes_slack and stages > 1 else 0
        else:
            slack = int(request.slack)
        for chunks in counts:
            if auto and kind.fixed_chunks not in (None, chunks):
                continue
            if auto and name == "interleaved" and chunks == 1:
                continue
            yield Recipe(name, chunks, slack)
