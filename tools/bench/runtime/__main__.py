"""`python -m tools.bench.runtime [sleeping] [compute]`."""

import sys

from tools.bench.runtime.compute import compute
from tools.bench.runtime.sleeping import sleeping

if __name__ == "__main__":
    what = sys.argv[1:] or ["sleeping", "compute"]
    if "sleeping" in what:
        sleeping()
    if "compute" in what:
        compute()
