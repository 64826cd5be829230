"""`python -m tools.bench.fuzz [cases] [--seed N] [part ...]`: mutated files and drawn options, a million by default.

Only a `PipepartError` may come out of a case, within its time limit, and no process may be started and no socket opened.
Findings are printed with the smallest case that shows them; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tools.bench.fuzz.cases import run
from tools.bench.fuzz.parts import make_parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="cases or part", help="number of cases; names of parts")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    options = parser.parse_intermixed_args()
    words = list(options.words)
    cases = int(words.pop(0)) if words and words[0].isdigit() else 1_000_000
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        parts = make_parts(Path(folder))
        unknown = sorted(set(words) - {part.name for part in parts})
        if unknown:
            sys.exit(f"there is no part {unknown[0]!r}; there are: {', '.join(part.name for part in parts)}")
        chosen = [part for part in parts if not words or part.name in words]
        return 0 if run(chosen, cases, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
