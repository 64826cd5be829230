"""`python -m tools.bench.faults [repetitions]`."""

import sys

from tools.bench.faults.repeat import repeat

if __name__ == "__main__":
    table, clean = repeat(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    print(table)
    sys.exit(0 if clean else 1)
