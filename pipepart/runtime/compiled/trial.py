"""`compile="auto"`: chunks are compiled when a run has lasted long enough to win the time back, and if it is faster.

The first stage decides before each training step and tells the other stages with the batch. Until steps have taken
`BEFORE` seconds, chunks run as they are: the compiler takes about a minute, and must make steps a tenth faster to win that
back in the ten minutes that follow. Then one step compiles, and the next ones try both forms in turn. The faster one stays.

```
as it is ... as it is | compiles | as it is  compiled  as it is  compiled ... | the faster one
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Trial"]

BEFORE = 600.0
"""Seconds of training before the trial."""
PAIRS = 5
"""Steps of each form in the trial."""
GAIN = 0.03
"""The part of a step that compiled chunks must save."""


class Trial:
    """The decision of one run, on the first stage. All replicas come to the same one."""

    def __init__(self) -> None:
        self.chosen: bool | None = None
        """Whether chunks are compiled; None before the end of the trial."""
        self._before = 0.0
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._steps = 0

    def of_next(self, total: Callable[[Sequence[float]], list[float]] | None) -> bool:
        """Return whether the next training step runs compiled chunks. `total` returns sums over all replicas."""
        if self.chosen is not None:
            return self.chosen
        own = [self._before, 1.0]
        for compiled in (True, False):
            own += [sum(self._times[compiled]), len(self._times[compiled])]
        before, replicas, on, counted_on, off, counted_off = total(own) if total is not None else own
        if before < BEFORE * replicas:
            return False
        self._steps += 1
        if self._steps > 1 + 2 * PAIRS:
            measured = counted_on > 0 and counted_off > 0
            self.chosen = bool(measured and on / counted_on < (1 - GAIN) * off / counted_off)
            return self.chosen
        return self._steps % 2 == 1

    def took(self, seconds: float, compiled: bool, full: bool) -> None:
        """Note the time of a training step. `full`: all its micro-batches have the size of the plan."""
        if self._steps == 0:
            self._before += seconds
        elif self._steps > 1 and full:
            self._times[compiled].append(seconds)
