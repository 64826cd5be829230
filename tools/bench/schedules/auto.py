"""How good `auto` is: random uneven chunks, ratios, links and memory limits, against fixed schedules and the bound."""

from __future__ import annotations

import random
import statistics
import time

from pipepart.schedule import ChunkCosts, Edges, best_schedule

__all__ = ["auto_quality"]


def _problem(draw: random.Random) -> tuple[int, int, int, ChunkCosts, float | None]:
    p, m, v = draw.choice((2, 3, 4, 8)), draw.choice((4, 8, 16, 32)), draw.choice((1, 1, 2))
    chunks = p * v
    forward = tuple(draw.uniform(0.5, 1.5) / v for _ in range(chunks))
    inputs, weights = draw.uniform(0.7, 2.0), draw.uniform(0.3, 1.5)
    links = {pair: draw.choice((0.0, 0.05, 0.3)) for pair in sorted(Edges.chain(chunks).forward)}
    costs = ChunkCosts(
        forward,
        tuple(inputs * f for f in forward),
        tuple(weights * f for f in forward),
        activation=(1 / v,) * chunks,
        send_forward=links,
        send_backward=links,
        contention=draw.random() < 0.3,
    )
    return p, m, v, costs, draw.choice((None, float(p), 1.5 * p, 2.0 * p))


def auto_quality(count: int, *, split: bool) -> str:
    """One paragraph: how often `auto` is proved best, its gap to the bound, and its gain over the best fixed schedule."""
    gaps, gains, times, unmatched = [], [], [], 0
    for seed in range(count):
        p, m, _, costs, limit = _problem(random.Random(seed))
        start = time.perf_counter()
        choice = best_schedule(p, m, costs, memory_limit=limit, split=split)
        times.append(time.perf_counter() - start)
        gaps.append(choice.gap)
        if choice.fixed:
            gains.append(min(step for _, step in choice.fixed) / choice.step_time - 1)
        else:
            unmatched += 1
    proved = sum(gap < 1e-6 for gap in gaps)
    return (
        f"{count} random problems, backward {'may be split' if split else 'whole'}: "
        f"proved best in {proved}, gap to the bound mean {100 * statistics.mean(gaps):.2f} % "
        f"(worst {100 * max(gaps):.1f} %), gain over the best fixed schedule that fits mean "
        f"{100 * statistics.mean(gains):.2f} % (most {100 * max(gains):.1f} %), "
        f"no fixed schedule fits in {unmatched}; {statistics.mean(times):.2f} s each"
    )
