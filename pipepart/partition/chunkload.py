"""The load of chunks from prefix sums: compute, communication, memory with and without recomputation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipepart.partition.instance import NEVER, Instance, Ints, Position

__all__ = ["Prefixes", "chunk_loads"]


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Sums over each state of all that adds up over classes."""

    least: Ints
    counts: Ints
    compute: Ints
    extra: Ints
    forbidden: Ints
    state: Ints
    saved: Ints
    side: Ints
    """State -> how many forced cuts it contains in full."""
    border: Ints
    """State -> 1 if it is exactly a forced cut."""

    @staticmethod
    def along(instance: Instance, order: Ints) -> Prefixes:
        """The sums over the prefixes of a linear order."""
        n = len(order)
        cuts = int(instance.side.max()) if n else 0
        size = np.array([int((instance.side < cut).sum()) for cut in range(1, cuts + 1)], dtype=np.int64)
        inside = np.zeros((cuts, n + 1), dtype=np.int64)
        for cut in range(cuts):
            inside[cut] = _sums((instance.side[order] <= cut).astype(np.int64))
        side = (inside == size[:, None]).sum(axis=0) if cuts else np.zeros(n + 1, dtype=np.int64)
        start = np.concatenate((np.full(1, -1, dtype=np.int64), size))
        border = (start[side] == np.arange(n + 1)).astype(np.int64)
        return Prefixes(
            least=_sums(instance.least[order]),
            counts=_sums(instance.counts[order]),
            compute=_sums(instance.compute[:, order]),
            extra=_sums(instance.extra[:, order]),
            forbidden=_sums(instance.forbidden[:, order]),
            state=_sums(instance.state[order]),
            saved=_sums(instance.saved[order]),
            side=side,
            border=border,
        )


def _sums(values: Ints) -> Ints:
    """Prefix sums along the last axis, from zero."""
    zero = np.zeros((*values.shape[:-1], 1), dtype=np.int64)
    return np.concatenate((zero, np.cumsum(values, axis=-1)), axis=-1)


def chunk_loads(
    instance: Instance,
    sums: Prefixes,
    source: Ints,
    target: Ints,
    position: Position,
    comm: Ints,
    received: Ints,
    limit: int,
) -> Ints:
    """Ticks of the chunks between source and target states (arrays that broadcast); `NEVER` where not allowed.

    ``comm``: ticks of what crosses the borders; ``received``: bytes that arrive, kept by a chunk that recomputes.
    """
    kind = position.kind
    compute = sums.compute[kind][target] - sums.compute[kind][source]
    load = np.maximum(compute, comm) if instance.overlap else compute + comm
    valid = (sums.counts[target] > sums.counts[source]) & (sums.forbidden[kind][target] == sums.forbidden[kind][source])
    if sums.side[-1]:
        passed = sums.side[target] - sums.side[source]
        valid &= (passed == 0) | ((passed == 1) & (sums.border[target] == 1))
    if instance.limited:
        state = sums.state[target] - sums.state[source]
        saved = sums.saved[target] - sums.saved[source]
        fits = (state + position.held * saved <= position.limit) & instance.keeps
        if instance.recomputes:
            again = compute + sums.extra[kind][target] - sums.extra[kind][source]
            slower = np.maximum(again, comm) if instance.overlap else again + comm
            needed = state + (position.held * received + saved if position.held else 0)
            load = np.where(fits, load, slower)
            fits = fits | (needed <= position.limit)
        valid &= fits
    return np.where(valid & (load <= limit), load, NEVER)
