"""The results of checks: a verdict is what one rank says, a check is one line of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAIL", "OK", "SKIPPED", "Check", "Verdict", "combined", "failed", "passed", "skipped"]

OK, FAIL, SKIPPED = "ok", "fail", "skipped"


@dataclass(frozen=True)
class Verdict:
    """The answer of one rank: `state` is ok, fail or skipped."""

    state: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    subject: str
    name: str
    state: str
    text: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


def passed(text: str, **figures: Any) -> Verdict:
    """Return the verdict of a check that has passed."""
    return Verdict(OK, text, figures)


def failed(text: str, **figures: Any) -> Verdict:
    """Return the verdict of a check that has failed."""
    return Verdict(FAIL, text, figures)


def skipped(text: str) -> Verdict:
    """Return the verdict of a check that cannot be done here, with the reason."""
    return Verdict(SKIPPED, text)


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of all ranks: the first failure, else the first reason to skip, else that of rank 0."""
    for state in (FAIL, SKIPPED):
        for rank, verdict in enumerate(verdicts):
            if verdict.state == state:
                return verdict if state == SKIPPED else Verdict(state, f"rank {rank}: {verdict.text}", verdict.figures)
    return verdicts[0]
