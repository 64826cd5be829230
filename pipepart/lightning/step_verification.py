"""Holding the pipeline of a training step against one process, before the first step counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from pipepart.build.verification import reference_of, verification
from pipepart.lightning.effects import Effects
from pipepart.recording import Recording
from pipepart.runtime import StageRuntime
from pipepart.samples.pieces import Pieces

__all__ = ["Verification"]


class Verification:
    """One process on the example, run when this rank still has the whole model; the pipeline is held against it later."""

    def __init__(
        self,
        recording: Recording,
        example: Any,
        microbatches: int,
        context: Callable[[], AbstractContextManager[Any]],
        pieces: Pieces | None = None,
    ) -> None:
        self._recording, self._context = recording, context
        self._reference = reference_of(recording, (example,), {}, microbatches, context, pieces)

    def table(self, runtime: StageRuntime, effects: Effects) -> str:
        """Run the pipeline and write the table; every rank must call it."""
        names = {self._recording.loss_index or 0: "loss"}
        for effect in effects.all:
            if effect.kind == "log":
                names.update(dict.fromkeys(effect.outputs.values(), effect.target))
        return verification(runtime, self._reference, names, effects.separate, self._context)
