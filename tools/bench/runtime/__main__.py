"""`python -m tools.bench.runtime [sleeping|compute]`."""

import sys

from tools.bench.runtime.sleeping import sleeping

if __name__ == "__main__":
    what = sys.argv[1:] or ["sleeping"]
    if "sleeping" in what:
        print(sleeping())
