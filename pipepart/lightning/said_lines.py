"""Warnings of a step, and lines that it writes to logs of Python, that have no values of the batch.

A step runs several times while it is recorded. A line of several of these runs belongs to every step; a line of one run only
is written once, as by functions that warn once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pipepart.errors import CaptureError
from pipepart.lightning.noted_effects import Effect
from pipepart.lightning.outward import OUTWARD, repeat_outward
from pipepart.recording.inputs import trees

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["SaidLines"]

_Line = tuple[str, Any, dict[str, Any], int]
"""The name of the call, its arguments, what is needed to repeat it, and the number of the effect that follows it."""


def _refuse_values(runs: Iterable[Iterable[_Line]]) -> None:
    """Refuse a line of the program that gave other texts in another run: it has values that the recording does not see."""
    known: dict[Any, set[str]] = {}
    for run in runs:
        texts: dict[Any, set[str]] = {}
        for name, value, options, _ in run:
            record = options.get("record")
            place = (options["file"], options["line"]) if record is None else (record.pathname, record.lineno)
            texts.setdefault((name, *place), set()).add(str(value[0]))
        for (name, file, line), found in texts.items():
            if known.setdefault((name, file, line), found).isdisjoint(found):
                raise CaptureError(
                    f"{name} at {file.rpartition('/')[2]}:{line} makes a text of values in a way that cannot be repeated, such "
                    "as by %. Use an f-string, which is made again in each step, or do so in a hook (on_train_batch_end)."
                )


class SaidLines:
    """The lines of all recorded runs of a step."""

    def __init__(self) -> None:
        self._runs: list[dict[Any, _Line]] = []
        self._is_recorded = False

    def begin(self, recorded: bool) -> None:
        """Begin a run of the step."""
        self._is_recorded = recorded
        if recorded:
            self._runs.append({})

    def add(self, name: str, value: Any, options: dict[str, Any], position: int) -> None:
        """Add a line; `position` is the number of the effect that follows it."""
        if self._is_recorded:
            key = (name, str(value), options.get("line"), sum(line[0] == name for line in self._runs[-1].values()))
            self._runs[-1][key] = name, value, options, position

    def among(self, effects: Sequence[Effect], module: LightningModule) -> tuple[Effect, ...]:
        """Return the effects of a step with the lines of every step among them; write the other lines now."""
        lines = {key: line for run in self._runs for key, line in run.items()}
        enough = min(2, len(self._runs))  # runs at sizes that the model does not take end early
        kept = {key: line for key, line in lines.items() if sum(key in run for run in self._runs) >= enough}
        once = {key: line for key, line in lines.items() if key not in kept}
        _refuse_values(run.values() for run in self._runs)
        for _, value, options, _ in once.values():
            repeat_outward(options, value, module)
        found: list[Effect] = list(effects)
        for number, (name, value, options, position) in reversed(list(enumerate(kept.values()))):
            leaves, tree = trees.flatten(value)
            at = next((i for i, effect in enumerate(found) if effect.ordinal >= position), len(found))
            found.insert(at, Effect(OUTWARD, name, -1 - number, tree, leaves, options))
        return tuple(found)
