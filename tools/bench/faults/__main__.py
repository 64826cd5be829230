"""`python -m tools.bench.faults [repetitions]`, or `--thousand [--part K/N] [--seed S] [--count C] [--seconds T]`."""

import argparse
import sys

from tools.bench.faults.repeat import repeat
from tools.bench.faults.thousand import thousand

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.bench.faults", description=__doc__)
    parser.add_argument("repetitions", type=int, nargs="?", default=100)
    parser.add_argument(
        "--thousand", action="store_true", help="runs of a Trainer with checkpoints, each kind x phase x mode"
    )
    parser.add_argument("--part", default="1/1", help="one part of the thousand, as 3/10")
    parser.add_argument("--seed", type=int, default=0, help="the order of the cases, and their ranks and steps")
    parser.add_argument("--count", type=int, default=1000, help="cases of all parts")
    parser.add_argument("--seconds", type=float, help="no case is started after this time")
    given = parser.parse_args()
    if given.thousand:
        table, clean = thousand(given.part, given.seed, given.count, given.seconds)
    else:
        table, clean = repeat(given.repetitions)
    print(table)
    sys.exit(0 if clean else 1)
