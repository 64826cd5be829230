"""Loads that are needed again and again: all chunks between two ranges of states, computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipepart.partition.instance import Ints

__all__ = ["Table", "blocks"]

_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Table:
    """The chunks with a load of at most ``limit``, sorted by target."""

    limit: int
    sources: tuple[int, int]
    """Range of states that chunks start from."""
    targets: tuple[int, int]
    """Range of states that they end at."""
    source: Ints
    target: Ints
    load: Ints
    traffic: Ints

    def covers(self, limit: int, sources: tuple[int, int], targets: tuple[int, int]) -> bool:
        """Nothing is missing for a search under this limit between these ranges."""
        return (
            limit <= self.limit
            and self.sources[0] <= sources[0]
            and sources[1] <= self.sources[1]
            and self.targets[0] <= targets[0]
            and targets[1] <= self.targets[1]
        )


def blocks(work: Ints, sources: Ints, targets: Ints, limit: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of sources and targets, of bounded size, that hold every pair with at most ``limit`` work between."""
    source_work = work[sources]
    start = 0
    while start < len(targets):
        first = int(np.searchsorted(source_work, work[targets[start]] - limit, "left"))
        end = min(len(targets), start + max(1, _BLOCK // max(1, len(sources) - first)))
        upto = int(np.searchsorted(source_work, work[targets[end - 1]], "right"))
        if first < upto:
            yield first, upto, start, end
        start = end
