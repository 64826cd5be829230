"""What can go wrong in a user's hands. Every message says what happened, where, what was expected, and what to do."""

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
    """Base of all errors that pipepart raises for its users."""


class CaptureError(PipepartError):
    """A model or a step cannot be recorded, or was recorded with something baked in that has changed."""


class PartitionError(PipepartError):
    """A graph cannot be cut as asked (too many stages, no room in memory, contradicting wishes)."""


class ScheduleError(PipepartError):
    """A schedule is unknown, impossible, or breaks a dependency."""


class PlanError(PipepartError):
    """A plan does not fit the model, the devices or the batch, or its file is not a plan."""


class PipelineError(PipepartError):
    """Something failed while the pipeline was running."""


class ForeignTensorError(PipelineError):
    """The values of a tensor were used on a rank that does not hold them."""


class ConfigError(PipepartError):
    """A configuration value is not usable."""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known one, and all that are known."""
    known = sorted(options)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(known)}"
