"""Random numbers of steps: drawn from the stream of each stage, or seeded for each op so that the shape does not matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pipepart.recording.execution.draws import mix, number_of, set_key
from pipepart.runtime.device import generators
from pipepart.runtime.recompute import RandomState

__all__ = ["OpSeeds", "seeded"]


class OpSeeds:
    """The seeds of one run: a number for each step, from which the micro-batches and ops get theirs."""

    def __init__(self, randomness: str, replica: int) -> None:
        self._on, self._replica = randomness == "op", replica
        self.seed = 0
        """The same on all ranks."""

    def of_step(self, step: str, *numbers: int) -> int | None:
        """`numbers`: what tells this step from others of its kind, such as the count of batches so far."""
        if not self._on:
            return None
        key = mix(mix(self.seed, self._replica), number_of(step))
        for number in numbers:
            key = mix(key, number)
        return key


@contextmanager
def seeded(key: int, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Around a step whose ops are seeded. Gives what must be told the micro-batch before its ops run.

    Afterwards the generators of the process are as they were before.
    """
    before, here = RandomState(device), generators(device)
    try:
        yield lambda microbatch: set_key(mix(key, microbatch), here)
    finally:
        set_key(None)
        before.restore()
