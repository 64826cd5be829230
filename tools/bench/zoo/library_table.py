"""``python -m tools.bench.zoo libraries``: all models of all libraries, a row for each and a summary for each library."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence

from tools.bench.zoo.children import Found, Pair

__all__ = ["run"]

LEAST = 0.98
"""The share of models that must be equal, in capture and (of those that are not rightly flagged) in pipelines."""


def run(names: Sequence[str], path: str | None, timeout: float) -> int:
    """Check the models in child processes; exit code 1 if too few are equal, one differs without a word or one breaks."""
    pair, rows = Pair(), []
    try:
        for name in names:
            if rows and rows[-1].library != name.partition(".")[0]:
                pair.stop()  # a library may change torch for those after it
            rows.append(pair.check(name, timeout))
            print(_row(rows[-1]), flush=True)
            if path:
                with open(path, "w") as file:
                    json.dump([dataclasses.asdict(row) for row in rows], file, indent=1)
    finally:
        pair.stop()
    return _summary(rows)


def _row(row: Found) -> str:
    if row.missing:
        return f"{row.name:36} not installed: {row.missing}"
    report = row.report
    return (
        f"{row.name:36} {'equal' if report.equal else 'FAILED':8} ops {report.ops:5} capture {report.seconds:6.2f} s  "
        f"largest op {report.largest_op:4.0%} (leaf {report.largest_leaf:4.0%})  2 stages {row.pipeline:8} {row.dtype:8}"
        f"{'whole: ' + ', '.join(report.kept_whole) if report.kept_whole else ''}"
        f"{' | '.join([*report.problems[:2], *row.problems[:2]])}"
    )


def _summary(rows: Sequence[Found]) -> int:
    tried = [row for row in rows if not row.missing]
    captured = [row for row in tried if row.report.equal]
    piped = [row for row in tried if row.pipeline == "equal"]
    flagged = [row for row in tried if row.pipeline == "flagged"]
    libraries = sorted({row.library for row in tried})
    print(f"\n{'library':24} models  captured equal  2 stages equal  flagged, rightly")
    for library in libraries:
        of = [[row.library == library for row in part].count(True) for part in (tried, captured, piped, flagged)]
        print(f"{library:24} {of[0]:6}  {of[1]:14}  {of[2]:14}  {of[3]:16}")
    print(f"{f'all {len(libraries)}':24} {len(tried):6}  {len(captured):14}  {len(piped):14}  {len(flagged):16}")
    for row in flagged:
        print(f"flagged: {row.name}: {' | '.join(row.problems)}")
    for row in rows:
        if row.missing:
            print(f"not installed (make zoo-env): {row.name}: {row.missing}")
    if captured:
        seconds = [row.report.seconds for row in captured]
        print(f"capture: median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s")
    bad = [row for row in tried if row.pipeline in ("differs", "failed", "died", "no end")]
    print(f"different from one process, or without an end: {[row.name for row in bad] or 'none'}")
    can_be_equal = len(tried) - len(flagged)  # samples of the others meet: the model itself is another on micro-batches
    enough = bool(tried) and len(captured) >= LEAST * len(tried) and len(piped) >= LEAST * can_be_equal
    return 0 if enough and not bad else 1
