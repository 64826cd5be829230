"""`python -m tools.bench.exits [runs] [trainer|command|plain ...]`: tiny runs in a row, of each kind in turn."""

import sys

from tools.bench.exits.repeat import KINDS, repeat

if __name__ == "__main__":
    words = sys.argv[1:]
    count = int(words.pop(0)) if words and words[0].isdigit() else 200
    unknown = sorted(set(words) - set(KINDS))
    if unknown:
        sys.exit(f"there is no kind of run {unknown[0]!r}; there are: {', '.join(KINDS)}")
    sys.exit(0 if repeat(count, words or list(KINDS)) else 1)
