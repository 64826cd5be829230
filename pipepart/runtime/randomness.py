"""Random numbers of steps: seeds for each op, and the replay of a forward with the random numbers of its first run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from pipepart.devices import generators
from pipepart.recording.execution.draws import mix, number_of, set_key

__all__ = ["OpSeeds", "RandomState", "recomputing", "running_again", "seeded"]

_active = False


class OpSeeds:
    """The seeds of one run: one key for each step, from which its micro-batches and ops derive theirs."""

    def __init__(self, randomness: str, replica: int) -> None:
        self._on, self.replica = randomness == "op", replica
        self.seed = 0
        """The seed of the run, equal on all ranks."""

    def of_step(self, step: str, *numbers: int) -> int | None:
        """Return the key of a step, or None with ``randomness="stage"``.

        `numbers` distinguish steps of one name, for example the count of batches so far.
        """
        if not self._on:
            return None
        key = mix(mix(self.seed, self.replica), number_of(step))
        for number in numbers:
            key = mix(key, number)
        return key


class RandomState:
    """The states of the random generators of Python, NumPy and torch at the moment of construction."""

    def __init__(self, device: torch.device) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = [(generator, generator.get_state()) for generator in generators(device)]

    def restore(self) -> None:
        """Set all generators back to these states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in self._torch:
            generator.set_state(state)


@contextmanager
def seeded(key_of: Callable[[int], int], device: torch.device) -> Iterator[Callable[[int], None]]:
    """Seed the ops of a step that draw random numbers, and restore the generators of the process afterwards.

    `key_of` gives the key of a micro-batch. Yields a function that must be called with the micro-batch before its ops run.
    """
    before, here = RandomState(device), generators(device)
    try:
        yield lambda microbatch: set_key(key_of(microbatch), here)
    finally:
        set_key(None)
        before.restore()


@contextmanager
def recomputing(chunk: nn.Module, first: RandomState, device: torch.device) -> Iterator[None]:
    """Run a forward of `chunk` with the random numbers of its `first` run. Buffers such as statistics do not change."""
    global _active
    now = RandomState(device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in chunk.buffers()]
    first.restore()
    _active = True
    try:
        yield
    finally:
        _active = False
        now.restore()
        for buffer, before in buffers:
            # Through .data: autograd must not treat this as a change between forward and backward.
            buffer.data.copy_(before)


def running_again() -> bool:
    """Return whether the current forward is a recomputation."""
    return _active
