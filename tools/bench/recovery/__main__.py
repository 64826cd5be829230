"""`python -m tools.bench.recovery [--recipe mlp] [--every 50] [--repeat 3] [--from memory disk]`: needs root, on Linux.

Two hosts (network namespaces) with two ranks each train a recipe at 2 x 2. After some steps one host ends. Printed are the
seconds from its end to the first step of the other host alone, and the steps that were done twice.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.bench.recovery.lost_host import Recovery, recovered

LIMIT = 30.0
"""Seconds that a recovery may take."""


def table(found: list[Recovery], every: int) -> tuple[str, bool]:
    """The lines of the table, and whether all recoveries were fast enough and repeated few enough steps."""
    lines = [f"{'from':8} {'notice':>8} {'restart':>8} {'total':>8}  steps: lost at, went on after, repeated"]
    good = True
    for one in found:
        good = good and one.total < LIMIT and one.repeated <= every
        lines.append(
            f"{one.source:8} {one.noticed:6.1f} s {one.total - one.noticed:6.1f} s {one.total:6.1f} s  "
            f"{one.lost_at}, {one.went_on_after}, {one.repeated} (allowed: {every})"
        )
    lines.append(f"limit: {LIMIT:.0f} s; 10 s of the restart are the wait for the lost host")
    return "\n".join(lines), good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.bench.recovery", description=__doc__)
    parser.add_argument("--recipe", default="mlp")
    parser.add_argument(
        "--every", type=int, default=50, help="steps between two states in memory, or two checkpoints on disk"
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--from", dest="sources", nargs="*", default=["memory", "disk"], choices=["memory", "disk"])
    given = parser.parse_args()
    results = []
    for _ in range(given.repeat):
        for source in given.sources:
            with tempfile.TemporaryDirectory(prefix="pipepart-recovery-") as folder:
                results.append(recovered(Path(folder), given.recipe, source, given.every))
    text, fast = table(results, given.every)
    print(text)
    sys.exit(0 if fast else 1)
