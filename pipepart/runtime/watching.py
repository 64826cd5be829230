"""The state of a rank as its watcher sees it: its current work, and a failure of the job that the watcher has found."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch.distributed as dist

from pipepart.errors import PipelineError

__all__ = ["Stopped", "Watching"]


class Stopped(PipelineError):
    """Another rank has failed, and this rank does not wait for it any longer."""


@dataclass
class Watching:
    """Shared by the thread that runs steps and the watcher (`runtime/watcher.py`), if there is one.

    Transfers of an accelerator neither raise nor return if the other end is lost. The watcher ends them, and everything that
    was computed since then is worthless: `check` raises at the next action, and at the end of each guarded region.
    """

    groups: list[dist.ProcessGroup] = field(default_factory=list)
    """The groups whose transfers the watcher ends."""
    cause: str | None = None
    """The text of the error that ends this rank; None while no failure is known."""
    doing: str = "set-up"
    since: float = 0.0
    """The time of the last progress."""
    depth: int = 0
    """The number of guarded regions around the current work."""

    def enter(self) -> None:
        """Begin a region in which this rank may wait for others."""
        self.depth += 1
        self.since = time.monotonic()

    def leave(self) -> None:
        """End the region that was entered last."""
        self.depth -= 1
        self.since = time.monotonic()

    def at(self, what: str) -> None:
        """Note the work that begins now; raise if the job has failed."""
        self.check()
        self.doing, self.since = what, time.monotonic()

    def check(self) -> None:
        """Raise if the watcher has found a failure of the job."""
        if self.cause is not None:
            raise Stopped(self.cause)
