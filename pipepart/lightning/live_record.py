"""The record of a run while it runs: `live.json` and `trace.json` in its folder, for `pipepart view --live`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipepart.report import save_timeline
from pipepart.report.live_state import LiveState, save_live
from pipepart.schedule import Timeline

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["LiveRecord"]

_PAUSE = 2.0
"""Seconds between two writes."""


class LiveRecord:
    """Writes what a viewer shows. It is for viewers only: a file that cannot be written is left out."""

    def __init__(self, folder: Path, title: str, trainer: Trainer) -> None:
        total = trainer.estimated_stepping_batches
        self._folder = folder
        of, now = int(total) if 0 < total < float("inf") else None, time.time()
        self._state = LiveState(title, os.getpid(), socket.gethostname(), now, now, of=of)
        self._written = 0.0
        self._write(None)

    def add(
        self, trainer: Trainer, timeline: Timeline | None, memory: Sequence[float], figures: dict[str, float]
    ) -> None:
        """Add the logged values of this step, and write the files if the last time is long enough ago."""
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if _is_number(value)}
        self._state = self._state.at(trainer.global_step, values, memory, figures)
        if time.monotonic() - self._written > _PAUSE:
            self._write(timeline)

    def end(self, how: str) -> None:
        """Write the last state, once."""
        if self._state.ended is None:
            self._state = self._state.end(how)
            self._write(None)

    def _write(self, timeline: Timeline | None) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        if timeline is not None:
            with suppress(OSError):
                save_timeline(self._folder / "trace.json", timeline)
        with suppress(OSError):
            save_live(self._folder, self._state)
        self._written = time.monotonic()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
