"""The state of a running job in a file, `live.json`: steps, logged values, memory, and whether the job has ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pipepart.errors import PlanError
from pipepart.files import load_json, write_whole
from pipepart.values import Range

__all__ = ["LIVE", "LiveState", "load_live", "save_live"]

LIVE = "live.json"
_MOST = 400
Value = Annotated[float, Range(-1e308, 1e308)]
"""Points of a curve: beyond that, every second one is left out."""


@dataclass(frozen=True)
class LiveState:
    """What a job says of itself while it runs."""

    title: str
    process: int
    """The process of rank 0, by which a viewer on the same host sees the end of a job that was killed."""
    host: str
    started: float
    renewed: float
    """Seconds since 1970."""
    step: int = 0
    of: int | None = None
    """All steps of the run, if their number is known."""
    steps: tuple[int, ...] = ()
    """The steps at which values were recorded."""
    values: Mapping[str, tuple[Value | None, ...]] = field(default_factory=dict)
    """For each logged name its value at each of these steps; None where it had none that is finite."""
    memory: tuple[float, ...] = ()
    """Peak bytes of each stage."""
    figures: Mapping[str, Value] = field(default_factory=dict)
    ended: str | None = None
    """How the job has ended; None while it runs."""

    def at(
        self, step: int, values: Mapping[str, float], memory: Sequence[float], figures: Mapping[str, float]
    ) -> LiveState:
        """The state after another record. A curve of too many points keeps every second one."""
        names = dict.fromkeys((*self.values, *values))
        none = (None,) * len(self.steps)
        curves = {name: (*self.values.get(name, none), _finite(values.get(name))) for name in names}
        steps = (*self.steps, step)
        if len(steps) > _MOST:
            steps, curves = steps[::2], {name: curve[::2] for name, curve in curves.items()}
        known = {name: value for name, value in figures.items() if _finite(value) is not None}
        return replace(
            self, step=step, steps=steps, values=curves, memory=tuple(memory), figures=known, renewed=time.time()
        )

    def end(self, how: str) -> LiveState:
        return replace(self, ended=how, renewed=time.time())


def _finite(value: float | None) -> float | None:
    return value if value is not None and value - value == 0 else None


def save_live(folder: Path, state: LiveState) -> None:
    write_whole(folder / LIVE, json.dumps({"pipepart": "live", **asdict(state)}, allow_nan=False))


def load_live(folder: Path) -> LiveState:
    """Read the state. PlanError: there is none, or it is not usable."""
    found = load_json(folder / LIVE)
    entries = dict(found.entries())
    entries.pop("pipepart", None)
    state = replace(found, value=entries).read(LiveState)
    if any(len(curve) != len(state.steps) for curve in state.values.values()):
        raise PlanError(f"{folder / LIVE}: a curve has another number of points than steps ({len(state.steps)})")
    return state
