"""Options of planning and requests to the planner, which are refused before anything is measured if they are invalid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from pipepart.cost.cluster import Cluster
from pipepart.errors import PlanError, ScheduleError, did_you_mean
from pipepart.partition import Link
from pipepart.planning.head_mode import HeadMode, HeadOption
from pipepart.planning.layout import BY_PROCESSOR, GROUP_LINK, LOCAL_LINK, Handling, Layout, MeasuredLinks
from pipepart.planning.sync_mode import SyncMode, SyncOption
from pipepart.schedule import SCHEDULES, read_csv
from pipepart.values import Count, Range, check_fields, shortened

__all__ = [
    "PER_STAGE",
    "TRAINING_SCHEDULES",
    "MicrobatchCount",
    "PlanOptions",
    "PlanRequest",
    "ScheduleChoice",
    "ScheduleName",
    "Shape",
    "auto_microbatches",
    "check_schedule",
    "even_count",
    "neighbouring_counts",
    "schedule_choices",
]

TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "forward")
"""The schedules that the runtime can execute."""

ScheduleName = Literal[
    "auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v", "zb_1p", "zb_2p"
]
"""The names of schedules, for type checkers and editors."""

PER_STAGE = (1, 2, 4, 8)
"""Numbers of micro-batches per stage that are tried."""

_USUAL_PER_STAGE = 4
"""Number of micro-batches per stage that is used before anything is measured."""

_AUTO_SLACK = 1
"""Slack that ``auto`` uses: one micro-batch in flight more than 1F1B needs absorbs jitter between stages."""

_AUTO_ORDER = ("1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved", "zb_v")
"""The schedules that ``auto`` tries, the simplest first."""

_AUTO_CHUNKS = (2, 4)
"""Chunks per stage that ``auto`` tries for schedules that take any number."""

_Options = TypeVar("_Options", bound="PlanOptions")


@dataclass(frozen=True)
class MicrobatchCount:
    """A number of micro-batches for the batch of a replica."""

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
class ScheduleChoice:
    """A schedule with its chunks per stage and its slack."""

    schedule: str
    chunks: int
    slack: int

    def __str__(self) -> str:
        more = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return self.schedule + more + (f", slack {self.slack}" if self.slack else "")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options that decide the plan. ``"auto"`` leaves a choice to planning.

    The annotation of an option declares its type and its range. An invalid value raises an error.
    """

    stages: Count | Literal["auto"] = "auto"
    """Devices of one pipeline. ``auto``: all devices in one pipeline."""
    replicas: Count | Literal["auto"] = "auto"
    """Whole pipelines, data parallel. ``auto``: as many as the devices allow."""
    microbatches: Count | Literal["auto"] = "auto"
    """Parts of a batch. ``auto``: 4 per stage, or another number that is measured to be clearly faster."""
    schedule: ScheduleName | str = "auto"
    """The name of a schedule or the path of a ``.csv`` file of actions. ``auto``: the shortest simulated step."""
    chunks: Count | Literal["auto"] = "auto"
    """Chunks per stage."""
    slack: Annotated[int, Range(0, 65_536)] | Literal["auto"] = "auto"
    """Additional micro-batches that a stage may start before its first backward."""
    keep_together: Sequence[Sequence[str]] = ()
    """Groups of module paths that stay in one chunk each."""
    split_at: Sequence[str] | None = None
    """Module paths before which a cut lies. If the schedule has more chunks, the planner chooses the other cuts."""
    recompute: bool | Literal["auto"] = "auto"
    """True: every chunk runs its forward again before its backward; False: none; ``auto``: where memory is short."""
    memory_limit: Annotated[float, Range(1, 2**63)] | None = None
    """Bytes that one device may use. None: as much as it has, without a reserve on an accelerator."""
    head: HeadOption = "auto"
    """How a linear layer that ends in a cross-entropy is run: ``whole``; ``sliced``, some tokens at a time, so that the scores
    of all tokens are never held; ``{"slice": tokens}``; ``auto``: sliced where memory demands it."""

    sync: SyncOption = "mean"
    """How replicas are kept in step: the name of a mode, or a mapping with ``mode`` and the settings of the mode."""

    def __post_init__(self) -> None:
        check_fields(self)
        SyncMode.of(self.sync).check_replicas(self.replicas)
        HeadMode.of(self.head)
        check_schedule(self.schedule)
        if not all(self.keep_together):
            raise PlanError("keep_together contains an empty group; expected at least one module path in each group")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @classmethod
    def among(cls: type[_Options], values: Mapping[str, Any]) -> _Options:
        """Make the options from the entries that have the name of an option: a section of a configuration, ``locals()``.

        A function that passes its arguments by ``locals()`` has a signature that tests/test_options.py compares with the
        fields of this class, types included.
        """
        return cls(**{name: values[name] for name in cls.names() if name in values})

    def request(self, batch_size: int, **more: Any) -> PlanRequest:
        """Make a request to the planner; `more`: other fields of `PlanRequest`, or other values."""
        given = {name: getattr(self, name) for name in PlanOptions.names()}
        return PlanRequest(batch_size=batch_size, **{**given, **more})


@dataclass(frozen=True)
class PlanRequest(PlanOptions):
    """A request to the planner: the options, the batch and the devices.

    The mesh is searched on ``devices``, or ``stages`` and ``replicas`` fix it; a fixed mesh is a search space of one
    point.
    """

    batch_size: int
    """Samples of one step over all replicas, or of each replica (see `each_replica`)."""
    devices: int | None = None
    """Number of devices. None: as many as the fixed mesh needs."""
    cluster: Cluster | None = None
    """The devices and their links. None: equal devices that are joined by `link`."""
    counts: tuple[MicrobatchCount, ...] = ()
    """Numbers of micro-batches to try, the usual one first: another must be clearly faster. Empty: the search makes them
    from `microbatches`, and none is preferred."""
    each_replica: bool = False
    """Whether `batch_size` is that of each replica; meshes are then compared by the seconds of a step for equal samples."""
    link: Link = LOCAL_LINK
    """The link between stages, if there is no cluster."""
    across: Link = GROUP_LINK
    """The link between replicas, if there is no cluster."""
    links: MeasuredLinks | None = None
    """The measured links of the job, if there is no cluster. They are used instead of `link` and `across`."""
    handling: Handling = BY_PROCESSOR
    """The host overhead of actions, if there is no cluster."""
    stage_memory: tuple[float, ...] = ()
    """Bytes that each stage may use by its devices, if there is no cluster. Empty: not known. `memory_limit` is preferred."""
    memory_source: str = ""
    """A description of the device with the least of `stage_memory`."""
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
        """Return the samples of one replica."""
        return self.batch_size if self.each_replica else max(1, -(-self.batch_size // replicas))

    def weight(self, replicas: int) -> float:
        """Return the factor of the seconds of a step that makes meshes comparable."""
        return 1.0 / replicas if self.each_replica else 1.0

    def layout(self, stages: int, replicas: int) -> Layout:
        """Return the devices of a mesh."""
        if self.cluster is not None:
            return Layout.on(self.cluster, stages, replicas, memory_limit=self.memory_limit)
        given = self.memory_limit
        memory = (math.inf if given is None else given,) * stages
        if given is None and self.stage_memory:
            same = len(self.stage_memory) == stages
            memory = self.stage_memory if same else (min(self.stage_memory),) * stages
        return Layout.uniform(
            stages,
            replicas,
            memory=memory,
            link=self.link,
            across=self.across,
            handling=self.handling,
            links=self.links if self.links is not None and len(self.links.hosts) == stages * replicas else None,
        )

    def limit_source(self, layout: Layout) -> str:
        """Return where the least memory limit of a layout comes from; empty if there is none."""
        least = min(layout.memory)
        if math.isinf(least):
            return ""
        if self.memory_limit is not None and least == self.memory_limit:
            return "memory_limit"
        if layout.kinds:
            return f"memory of {layout.kinds[layout.memory.index(least)]}"
        return self.memory_source

    def device_memory(self) -> list[float]:
        """Return the bytes that may be used of each device; one number if the devices are equal."""
        limit = math.inf if self.memory_limit is None else self.memory_limit
        if self.cluster is not None:
            return [min(limit, kind.memory) for kind in self.cluster.devices]
        return list(self.stage_memory) if self.memory_limit is None and self.stage_memory else [limit]


def check_schedule(schedule: str) -> None:
    """Refuse a schedule that does not exist, cannot train, or has a file that cannot be read."""
    if schedule.endswith(".csv"):
        read_csv(schedule)
    elif schedule in SCHEDULES and schedule not in TRAINING_SCHEDULES:
        raise ScheduleError(
            f"schedule {schedule!r} cannot train here; use one of: {', '.join(TRAINING_SCHEDULES)}, auto"
        )
    elif schedule != "auto" and schedule not in SCHEDULES:
        known = did_you_mean(schedule, (*TRAINING_SCHEDULES, "auto"))
        raise ScheduleError(f"schedule {shortened(schedule)} is not known: {known}")


def auto_microbatches(stages: int, batch_size: int) -> int:
    """Return the usual number of micro-batches, without a measurement.

    Four micro-batches per stage keep the bubble of a balanced pipeline below a fifth; one stage needs only one.
    """
    return max(1, min(batch_size, _USUAL_PER_STAGE * stages)) if stages > 1 else 1


def even_count(samples: int, count: int) -> MicrobatchCount:
    """Return a number of micro-batches of at most `count`, with all but the last of one size."""
    size = -(-samples // min(count, samples))
    return MicrobatchCount(-(-samples // size), size)


def neighbouring_counts(stages: int, samples: int, usual: int) -> list[MicrobatchCount]:
    """Return the numbers of micro-batches below and above the usual one, which are measured before a run.

    `usual` is the size of the usual micro-batch.
    """
    at = PER_STAGE.index(_USUAL_PER_STAGE)
    found = []
    for way in (PER_STAGE[:at][::-1], PER_STAGE[at + 1 :]):
        counts = [even_count(samples, each * stages) for each in way]
        found += [count for count in counts if count.size != usual][:1]
    return found


def schedule_choices(request: PlanRequest, stages: int) -> list[ScheduleChoice]:
    """Return all schedules that the request allows on so many stages, the simplest first."""
    found = list(_choices(request, stages))
    if not found:
        raise PlanError(
            f"no schedule takes chunks={request.chunks}; use schedule='interleaved', or leave chunks to 'auto'"
        )
    return found


def _choices(request: PlanRequest, stages: int) -> Iterator[ScheduleChoice]:
    if request.schedule.endswith(".csv"):
        yield ScheduleChoice(request.schedule, read_csv(request.schedule).chunks // stages, 0)
        return
    auto = request.schedule == "auto"
    if auto and stages == 1 and request.chunks == "auto":
        yield ScheduleChoice("1f1b", 1, 0 if request.slack == "auto" else int(request.slack))
        return
    for name in _AUTO_ORDER if auto else (request.schedule,):
        kind = SCHEDULES[name]
        if request.chunks != "auto":
            counts: tuple[int, ...] = (int(request.chunks),)
        elif kind.fixed_chunks is not None or not auto:
            counts = (kind.fixed_chunks or kind.usual_chunks,)
        else:
            counts = _AUTO_CHUNKS if kind.usual_chunks > 1 else (1,)
        if auto and kind.takes_slack is False and request.slack not in ("auto", 0):
            continue
        if request.slack == "auto":
            slack = _AUTO_SLACK if kind.takes_slack and stages > 1 else 0
        else:
            slack = int(request.slack)
        for chunks in counts:
            if auto and kind.fixed_chunks not in (None, chunks):
                continue
            if auto and kind.fixed_chunks is None and kind.usual_chunks > 1 and chunks == 1:
                continue
            yield ScheduleChoice(name, chunks, slack)
