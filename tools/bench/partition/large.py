"""Large graphs, made up: a long transformer, branching blocks, two towers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from pipepart.partition import Link, Problem

__all__ = ["LARGE"]

Build = Callable[[int], Problem]


def transformer(ops: int) -> Problem:
    """Layers of 20 ops: q, k and v side by side, two residuals, views that take a few microseconds."""
    rng = np.random.default_rng(0)
    edges: list[tuple[int, int]] = []
    seconds: list[float] = []
    sizes: list[float] = []

    def op(time: float, size: float, *sources: int) -> int:
        seconds.append(time * (1 + 0.05 * rng.random()))
        sizes.append(size)
        edges.extend((source, len(seconds) - 1) for source in sources)
        return len(seconds) - 1

    x = op(1e-4, 8e6)
    while len(seconds) + 20 <= ops:
        norm = op(2e-5, 8e6, x)
        heads = []
        for _ in range(3):
            projected = op(3e-4, 8e6, norm)
            heads.append(op(3e-6, 8e6, op(3e-6, 8e6, projected)))
        attention = op(4e-4, 8e6, *heads)
        merged = op(3e-4, 8e6, op(3e-6, 8e6, attention))
        x = op(1e-5, 8e6, x, op(1e-5, 8e6, merged))
        hidden = op(6e-5, 32e6, op(1.2e-3, 32e6, op(2e-5, 8e6, x)))
        x = op(1e-5, 8e6, x, op(1e-5, 8e6, op(1.2e-3, 8e6, hidden)))
    return _problem(seconds, sizes, edges)


def blocks(ops: int) -> Problem:
    """Blocks of four branches of six ops between two ops, with a residual: far more downsets than can be listed."""
    rng = np.random.default_rng(0)
    edges: list[tuple[int, int]] = []
    count = ops // 26
    for block in range(count):
        start, join = 26 * block, 26 * block + 25
        if block:
            edges.append((start - 1, start))
        for branch in range(4):
            line = [start, *range(start + 1 + 6 * branch, start + 7 + 6 * branch), join]
            edges.extend(pairwise(line))
        edges.append((start, join))
    total = 26 * count
    seconds = rng.random(total) * 1e-4 * (rng.random(total) > 0.3)
    return _problem(seconds.tolist(), (rng.random(total) * 1e6).tolist(), edges)


def towers(ops: int) -> Problem:
    """Two encoders side by side that meet at the end: the number of downsets is the product of their lengths."""
    rng = np.random.default_rng(0)
    half = ops // 2
    first, second = list(range(0, 2 * half, 2)), list(range(1, 2 * half, 2))
    edges = [(a, b) for line in (first, second) for a, b in pairwise(line)]
    edges += [(first[-1], 2 * half), (second[-1], 2 * half)]
    seconds = rng.random(2 * half + 1) * 1e-4
    return _problem(seconds.tolist(), [1e6] * (2 * half + 1), edges)


def _problem(seconds: list[float], sizes: list[float], edges: list[tuple[int, int]]) -> Problem:
    forward = np.array(seconds)
    return Problem(
        forward=forward,
        backward=2 * forward,
        parameter_bytes=np.zeros(len(seconds)),
        saved_bytes=np.array(sizes),
        output_bytes=np.array(sizes),
        edges=tuple(sorted(edges)),
        links=(Link(50e9, 1e-5),),
    )


LARGE: dict[str, Build] = {"transformer": transformer, "blocks": blocks, "towers": towers}
