"""Random numbers of single ops: the generators are seeded directly before an op, by the step and by the name of the op.

Emitted graphs call `before_draw` in front of each op that draws. Without a key it does nothing, and the op continues the
random stream of the process. With a key, the numbers depend only on the key and the op: not on ops that ran before in the
same process, and so not on the cut, the schedule or the number of forwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import torch

__all__ = ["before_draw", "mix", "number_of", "set_key", "watch_draws"]

_WORD = (1 << 64) - 1
_key: int | None = None
_generators: Sequence[torch.Generator] = ()
_watcher: Callable[[int], None] | None = None


def mix(one: int, other: int) -> int:
    """Return a pseudo-random 64-bit number for each pair of numbers (the finaliser of SplitMix64)."""
    word = (one + (other + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def number_of(name: str) -> int:
    """Return a number for a name, the same in every process."""
    return crc32(name.encode())


def set_key(key: int | None, generators: Sequence[torch.Generator] = ()) -> None:
    """From now on, seed these generators by this key before each op that draws; None ends the seeding."""
    global _key, _generators
    _key, _generators = key, generators


def watch_draws(watcher: Callable[[int], None] | None) -> None:
    """From now on, call `watcher` with the number of each op that draws, and seed nothing; None ends it."""
    global _watcher
    _watcher = watcher


def before_draw(op: int, outside: bool) -> None:
    """Seed the generators for the op with this number; with `outside`, also those of Python and numpy."""
    if _watcher is not None:
        _watcher(op)
        return
    if _key is None:
        return
    seed = mix(_key, op)
    for generator in _generators:
        generator.manual_seed(seed)
    if outside:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
