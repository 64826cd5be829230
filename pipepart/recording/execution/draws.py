"""Random numbers that an op draws for itself: the generators are seeded just before it, by the step and by its name.

Emitted graphs call `before_draw` in front of each op that draws. As long as nobody has set a key it does nothing, and the
op goes on with the stream of the process. With a key, the numbers depend on the key and the op alone: not on the ops that
ran before in the same process, so not on the cut, the schedule, or how often a forward runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch

__all__ = ["before_draw", "mix", "number_of", "set_key"]

_WORD = (1 << 64) - 1
_key: int | None = None
_generators: Sequence[torch.Generator] = ()


def mix(one: int, other: int) -> int:
    """A 64-bit number that looks like chance for each pair of numbers (the finaliser of SplitMix64)."""
    word = (one + (other + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def number_of(name: str) -> int:
    """A number for a name, the same in every process."""
    return crc32(name.encode())


def set_key(key: int | None, generators: Sequence[torch.Generator] = ()) -> None:
    """From here on, ops are seeded by this key (None: not at all) in these generators."""
    global _key, _generators
    _key, _generators = key, generators


def before_draw(op: int, outside: bool) -> None:
    """Seed the generators for the op with this number; with `outside` also Python's and numpy's."""
    if _key is None:
        return
    seed = mix(_key, op)
    for generator in _generators:
        generator.manual_seed(seed)
    if outside:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
