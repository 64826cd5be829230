"""What the proof of gradients costs: the time of capture with it and without it, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from pipepart.graph import capture
from pipepart.recording.recorded_run.runs import Call

__all__ = ["proof_ratio"]


@contextmanager
def without_gradients() -> Iterator[None]:
    """Recordings that are made inside are compared in their outputs alone."""
    kind: Any = Call
    before = Call.has_backward
    kind.has_backward = property(lambda call: False)
    try:
        yield
    finally:
        kind.has_backward = before


def _seconds(model: nn.Module, args: tuple[Any, ...]) -> float:
    start = time.process_time()  # other processes of a shared machine do not count
    capture(model, args)
    return time.process_time() - start


def proof_ratio(model: nn.Module, args: tuple[Any, ...], rounds: int = 3) -> float:
    """Time of capture with the proof over that without it: the median of pairs that are run in turn."""
    ratios = []
    capture(model, args)
    for i in range(rounds):
        took = {}
        for proved in (True, False) if i % 2 else (False, True):
            if proved:
                took[proved] = _seconds(model, args)
            else:
                with without_gradients():
                    took[proved] = _seconds(model, args)
        ratios.append(took[True] / took[False])
    return statistics.median(ratios)
