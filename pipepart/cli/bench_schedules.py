"""`pipepart bench schedules`: bubble and memory of every schedule against the bound, or the picture of one of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipepart.schedule import picture, table

__all__ = ["bench_schedules"]


def bench_schedules(words: Sequence[str]) -> int:
    """Simulated with equal stages; nothing is started."""
    parser = argparse.ArgumentParser(prog="pipepart bench schedules", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="numbers of stages (p)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 24], help="numbers of micro-batches (m)")
    parser.add_argument("--chunks", type=int, nargs="+", help="chunks per stage (v); default: 1 2 4")
    parser.add_argument("--gantt", metavar="NAME", help="draw this schedule (or .csv file) instead of the table")
    given = parser.parse_args(list(words))
    if given.gantt:
        from_file = given.gantt.endswith(".csv")
        text = picture(
            given.gantt,
            stages=None if from_file else given.stages[0],
            microbatches=None if from_file else given.microbatches[0],
            chunks=given.chunks[0] if given.chunks else None,
            color=sys.stdout.isatty(),
        )
        print(text)
    else:
        print(table(given.stages, given.microbatches, given.chunks or [1, 2, 4]))
    return 0
