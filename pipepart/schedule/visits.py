"""The visits of a stage to its chunks in one step, and the parameters that each of them borrows and gives back.

A visit is a run of actions of one chunk. Parameters are there from its first action on; transfers for the next visit set off
when a visit begins:

```
actions       F0 F0 F1 F1 B1 B1 B0 B0          two chunks, two micro-batches
visits        [ 0 ] [   1      ] [ 0 ]
microbatch    +0 -0 +1         -1 +0 -0        parameters come once per visit
step          +0    +1         -1    -0        parameters come once per step
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["Visit", "visits_of"]


@dataclass(frozen=True)
class Visit:
    """A run of actions of one chunk."""

    first: int
    """The place of its first action in the list of the stage."""
    last: int
    """The place of its last action."""
    borrowed: tuple[str, ...]
    """The parameters that must come before it; the others of the chunk are there."""
    returned: tuple[str, ...]
    """The parameters that are given back after it."""


def visits_of(chunks: Sequence[int], names: Mapping[int, Sequence[str]], once: bool) -> tuple[Visit, ...]:
    """Return the visits of a stage whose actions have these `chunks`.

    `names`: the parameters of each chunk. With `once`, what has come stays until its last use in the step; else it stays
    only if the next visit uses it.
    """
    runs: list[tuple[int, int, int]] = []
    for chunk, places in groupby(range(len(chunks)), key=lambda place: chunks[place]):
        run = list(places)
        runs.append((chunk, run[0], run[-1]))
    last_use = {name: number for number, (chunk, _, _) in enumerate(runs) for name in names[chunk]}
    held: dict[str, None] = {}
    found = []
    for number, (chunk, first, last) in enumerate(runs):
        borrowed = tuple(name for name in names[chunk] if name not in held)
        held.update(dict.fromkeys(borrowed))
        following = set(names[runs[number + 1][0]]) if number + 1 < len(runs) else set()
        stays = {name for name in held if (last_use[name] > number if once else name in following)}
        returned = tuple(name for name in held if name not in stays)
        held = {name: None for name in held if name in stays}
        found.append(Visit(first, last, borrowed, returned))
    return tuple(found)
