"""The error classes of users' errors. A message states the event, the place, the expected value and the remedy.

This module imports no other module of pipepart.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CaptureError",
    "ConfigError",
    "ForeignTensorError",
    "PartitionError",
    "PipelineError",
    "PipepartError",
    "PlanError",
    "ScheduleError",
    "did_you_mean",
]


class PipepartError(Exception):
    """The base of all errors that pipepart raises for users."""


class CaptureError(PipepartError):
    """A model or a step cannot be recorded, or a value that its recording depends on has changed."""


class PartitionError(PipepartError):
    """A graph cannot be divided as requested (too many stages, too little memory, contradictory options)."""


class ScheduleError(PipepartError):
    """A schedule is unknown, impossible, or violates a dependency."""


class PlanError(PipepartError):
    """A plan does not fit the model, the devices or the batch, or its file has no plan."""


class PipelineError(PipepartError):
    """A running pipeline failed."""


class ForeignTensorError(PipelineError):
    """The values of a tensor were used on a rank that does not hold them."""


class ConfigError(PipepartError):
    """A configuration value is invalid."""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return the end of an error message for an unknown name: the nearest known name, and all known names."""
    known = sorted(options)
    near = difflib.get_close_matches(word[:80], known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(known)}"
