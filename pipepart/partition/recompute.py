"""Which chunks of a stage run their forward again, so that the stage fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

__all__ = ["recomputed"]


def recomputed(
    forward: Mapping[int, float],
    saving: Mapping[int, float],
    needed: Callable[[Collection[int]], float],
    limit: float,
) -> set[int]:
    """The chunks of one stage that recompute; they share its memory.

    They change to recomputation one by one, the one that saves most per second of extra work first, until the stage
    fits. ``forward``: chunk -> seconds of extra work; ``saving``: chunk -> bytes that it saves alone; ``needed``: the
    bytes of the stage if some of its chunks recompute.
    """
    chosen: set[int] = set()
    for chunk in sorted(forward, key=lambda c: (forward[c] / max(saving[c], 1e-30), c)):
        if needed(chosen) <= limit:
            break
        if saving[chunk] > 0:
            chosen.add(chunk)
    return chosen
