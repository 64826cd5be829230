"""The options of planning: the part of the options of a pipeline that decides what its plan is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from pipepart.planning.request import PlanRequest, ScheduleName, check_request
from pipepart.values import Count, Range, check_fields

__all__ = ["PlanOptions"]

_Kind = TypeVar("_Kind", bound="PlanOptions")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Everything that the user fixes; planning chooses each option that is ``"auto"``.

    The annotation of an option declares its type and its range. Options with an invalid value cannot be made.
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
    memory_limit: Annotated[float, Range(0, 2**63, above=True)] | None = None
    """Bytes that one device may use. None: as much as it has."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_request(self.schedule)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @classmethod
    def among(cls: type[_Kind], values: Mapping[str, Any]) -> _Kind:
        """Make the options from those entries that have the name of one: a section of a configuration, or ``locals()``.

        A function that hands its arguments over by ``locals()`` has a signature that tests/test_options.py compares
        with the fields of this class, types included.
        """
        return cls(**{name: values[name] for name in cls.names() if name in values})

    def request(self, batch_size: int, **more: Any) -> PlanRequest:
        """These options as a request to the planner; `more`: other fields of `PlanRequest`, or other values."""
        given: dict[str, Any] = {name: getattr(self, name) for name in PlanOptions.names()}
        given["keep_together"] = tuple(tuple(group) for group in self.keep_together)
        given["split_at"] = None if self.split_at is None else tuple(self.split_at)
        return PlanRequest(batch_size=batch_size, **{**given, **more})
