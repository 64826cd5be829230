"""Running the forward of a chunk a second time, just before its backward, exactly as the first time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from pipepart.runtime.device import random_state, set_random_state

__all__ = ["RandomState", "again", "running_again"]

_active = False


class RandomState:
    """The state of the random generators at the first run: torch's, and those that models draw masks from besides."""

    def __init__(self, device: torch.device) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch, self._device = random_state(device), device

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        set_random_state(self._device, self._torch)


@contextmanager
def again(chunk: nn.Module, first: RandomState, device: torch.device) -> Iterator[None]:
    """The same random numbers as at the first run; buffers (running statistics) do not count it twice."""
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
            # By .data: the backward that follows must not take this for a change of its values.
            buffer.data.copy_(before)


def running_again() -> bool:
    """Whether the forward that runs now has run before for the same micro-batch."""
    return _active
