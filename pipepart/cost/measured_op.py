"""The measurements of one op, and of all ops of one kind, which share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipepart.cost.timing import Timer

__all__ = ["MeasuredOp", "OpKind"]

_REPEATS = (3, 15)  # least and most repeats of one kind of op
_AGAIN = 2  # repeats of a further op of a kind that was measured before
_BUDGET = 0.02  # seconds per kind of op and direction


@dataclass
class OpKind:
    """The measurements of all ops that compute the same on the same shapes."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    inputs_only: list[float] = field(default_factory=list)
    """Seconds of the backward without the gradients of parameters."""
    weights_only: list[float] = field(default_factory=list)
    """Seconds of the backward for the gradients of parameters alone."""

    def repeats(self, timer: Timer) -> Iterator[int]:
        """Yield repeat numbers until the budget of time is used; fewer for an op of a known kind."""
        if self.forward:
            yield from range(_AGAIN)
            return
        least, most = _REPEATS
        for repeat in range(most):
            if repeat == least:
                timer.read()
            known = len(self.forward)  # fewer than the repeats, if the timer reads the others later
            if repeat >= least and (sum(self.forward) + sum(self.backward)) * repeat / known > 2 * _BUDGET:
                return
            yield repeat


@dataclass
class MeasuredOp:
    """The measurements of one op."""

    kind: OpKind = field(default_factory=OpKind)
    trained: bool = False
    splits: bool = False
    """Whether the runtime can run the backward of the op in two halves. Halves of other ops are not measured: kernels are
    written for whole backwards, and some crash on a half (GroupNorm for weights alone, with channels-last strides)."""
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    """Seconds of the backward for gradients of parameters."""
    split: float = 0.0
    """Seconds by which both halves of the backward take longer than the whole: both do the work that they share."""
    parameter_bytes: int = 0
    saved_bytes: int = 0
