"""Updates of parameters and buffers inside a step: they belong to the batch, not to a micro-batch.

Updates of parameters by parameters run once for each batch, with the parameters of all stages that they need; everything else
is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipepart.errors import ConfigError
from pipepart.lightning.announce import tell
from pipepart.recording import Recording
from pipepart.recording.parameter_updates import ParameterUpdate, UpdateRefused, take_update
from pipepart.runtime import StageRuntime
from pipepart.runtime.gathering import Gathering, Wanted

__all__ = ["StepUpdates", "taken_out"]

_DO = (
    "Do one of these: move the update to a hook that runs once for each batch (on_train_batch_start has the same effect as the "
    "beginning of the step; hooks may use parameters of all stages), or use microbatches=1."
)


def taken_out(recording: Recording, microbatches: int | str, empty: bool) -> tuple[Recording, ParameterUpdate | None]:
    """Take updates of parameters out of a step; refuse other changes of what belongs to the batch.

    `empty`: the model was built on the meta device, so no rank can hold parameters of other stages.
    """
    for path, (buffers, line) in recording.updates.items() if microbatches != 1 else ():
        why = next(
            (note for note in recording.notes if note.startswith(f"kept {path!r} whole")),
            f"spectral norm, for example, improves its estimate in each call of {path!r}",
        )
        raise ConfigError(
            f"module {path!r}, called at {line}, changes its buffer {buffers[0]!r}, and would do so once for each micro-batch "
            f"({why}). Do one of these: update the buffer by tensor ops, which are recorded and run once for the batch; update "
            "it in the step itself or in a hook (on_train_batch_end); or use microbatches=1."
        )
    try:
        found, update = take_update(recording)
        if update is not None and empty:
            raise UpdateRefused(f"the step changes parameter {update.changed[0]!r} of a model built on the meta device")
    except UpdateRefused as refused:
        if microbatches == 1:
            return recording, None
        raise ConfigError(f"{refused}: a recorded step would do so once for each micro-batch. {_DO}") from None
    return found, update


class StepUpdates:
    """The updates of parameters of all recordings of one run, by the names of the recordings."""

    def __init__(self) -> None:
        self._updates: dict[str, ParameterUpdate | None] = {}
        self._told = False

    def add(self, name: str, update: ParameterUpdate | None) -> None:
        self._updates[name] = update

    def of(self, name: str) -> ParameterUpdate | None:
        """The update of a recording; None if it has none."""
        return self._updates.get(name)

    def run(self, name: str, before: bool, numbers: Callable[[], Mapping[str, Any]], runtime: StageRuntime) -> None:
        """Run the update of a recording, before or after its step. Every rank must call it."""
        update = self.of(name)
        if update is None or update.before != before:
            return
        given = numbers() if update.numbers else {}
        arguments = [given[key] for key in update.numbers]
        run = functools.partial(update.module, *arguments)
        with torch.no_grad():
            if runtime.groups is None or runtime.parts.whole:
                run()
                return
            gathering = Gathering(runtime, runtime.groups)
            used = frozenset(update.used)
            wanted = Wanted(used & gathering.parameters.keys(), used & gathering.buffers().keys())
            if not self._told:
                self._told = True
                mb = gathering.bytes_of(wanted) / 1e6
                tell(
                    f"pipepart: the step updates {len(update.changed)} parameters by others: {mb:.3g} MB are gathered once for "
                    "each batch\n"
                )
            try:
                gathering.gather(wanted)
                run()
            finally:
                gathering.put_back()
