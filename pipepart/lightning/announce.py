"""Messages of the strategy to the user, on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pipepart.lightning.namespaces import loaded
from pipepart.planning import Plan
from pipepart.planning.describe import format_seconds
from pipepart.report.account import Account
from pipepart.report.figures import measured_step, warm_steps
from pipepart.report.text import account_text

__all__ = ["measured_against_predicted", "said", "tell"]

_log = logging.getLogger("pipepart")
if not _log.handlers:  # shown by default, as Lightning's own messages; users configure it like any logger
    _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO)
    _log.propagate = False


def tell(text: str) -> None:
    """Log a message to the terminal, on rank 0."""
    loaded().rank_zero_only(_log.info)(text)


def measured_against_predicted(plan: Plan, step_times: Sequence[float]) -> str:
    """One line after a fit: the measured and the predicted time of a step."""
    measured = measured_step(step_times)
    if measured is None:
        return "pipepart: no training step was run, so there is no measured time to compare the prediction with"
    warm = len(warm_steps(step_times))

    def against(seconds: float) -> str:
        return f"{format_seconds(seconds)} ({seconds / measured - 1:+.0%})"

    by_costs = f" by rehearsal, {against(plan.step_time)} by the costs of its ops" if plan.rehearsed is not None else ""
    return (
        f"pipepart: measured {format_seconds(measured)} a step (median of {warm}, optimizer not included), "
        f"predicted {against(plan.predicted)}{by_costs}"
    )


def said(account: Account | None) -> str:
    """The account of a step after a fit."""
    if account is None:
        return "pipepart: where the time of a step went is not known: it needs five steps with automatic optimization"
    return f"pipepart: {account_text(account)}"
