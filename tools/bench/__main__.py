"""`python -m tools.bench [NAME ...]`: the benchmarks, one after the other; without names, those that need no extras."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

USUAL = ("schedules", "partition", "runtime")
NEEDS = {
    "zoo": 'the extra "zoo": pip install -c constraints.txt -e ".[zoo]"',
    "lightning": "the name of a part, and an environment of its own: make lightning-env",
}


def main() -> int:
    known = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__main__.py"))
    names = sys.argv[1:] or [name for name in USUAL if name in known]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark is called {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"== {name} (python -m tools.bench.{name})", flush=True)
        sys.argv = [f"tools.bench.{name}"]
        runpy.run_module(f"tools.bench.{name}", run_name="__main__", alter_sys=True)
    left = [name for name in known if name not in names]
    notes = [f"{name} (needs {NEEDS[name]})" if name in NEEDS else name for name in left]
    if notes:
        print(f"also there: {'; '.join(notes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
