"""`python -m tools.bench.runtime [sleeping] [compute] [compiled]`."""

import sys

from tools.bench.runtime.compiled import compiled
from tools.bench.runtime.compute import compute
from tools.bench.runtime.sleeping import sleeping

if __name__ == "__main__":
    what = sys.argv[1:] or ["sleeping", "compute"]
    if "sleeping" in what:
        sleeping()
    if "compute" in what:
        compute()
    if "compiled" in what:
        compiled()
