"""Recordings of one step: which of them holds for a batch.

A step may do different things at different times (a warm-up that ends, another form of batch). Each recording says what
it was specialised on; the first stage picks one that holds for the batch, or has a new one made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipepart.errors import CaptureError
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.microbatch import fitting_sizes

__all__ = ["MOST", "Variants"]

MOST = 16
"""More recordings of one step than this are not made: it would record at every step."""


@dataclass
class Variants:
    """The names of the recordings of one step, the one that was used last first."""

    step: str
    names: list[str] = field(default_factory=list)
    made: int = 0

    def new_name(self) -> str:
        """The first one has the name of the step itself."""
        if self.made == MOST:
            raise CaptureError(
                f"{self.step} was recorded {MOST} times, and this batch or step number needs another recording. Python "
                "decisions by numbers that change all the time cannot be recorded: write them with tensors (torch.where)."
            )
        self.made += 1
        return self.step if self.made == 1 else f"{self.step}#{self.made}"

    def choose(
        self, batch: Any, numbers: Mapping[str, Any], runtime: StageRuntime
    ) -> tuple[str | None, list[Any] | None]:
        """The recording for this batch and, on the first stage, its leaves. None: a new one is needed."""
        chosen: tuple[str | None, list[Any] | None] = (None, None)
        if runtime.is_first:
            with guarded(runtime.groups):
                chosen = self._fitting(batch, numbers, runtime)
        chosen = (runtime.from_first(chosen[0]), chosen[1])
        if chosen[0] is not None and chosen[0] != self.names[0]:
            self.names.remove(chosen[0])
            self.names.insert(0, chosen[0])
        return chosen

    def _fitting(
        self, batch: Any, numbers: Mapping[str, Any], runtime: StageRuntime
    ) -> tuple[str | None, list[Any] | None]:
        for name in self.names:
            recording = runtime.recording(name)
            wanted = {item.name for item in recording.inputs if item.kind == "number"}
            try:
                leaves = recording.flatten((batch,), {key: value for key, value in numbers.items() if key in wanted})
            except CaptureError:  # another structure, type or size
                continue
            # The graph sees micro-batches, so what it was specialised on is held against these.
            if fitting_sizes(recording, leaves, runtime.plan.microbatches) is not None:
                return name, leaves
        return None, None
