"""``python -m tools.bench.lightning modules [names...] [options]``: modules of other libraries, one device against 2 stages.

The libraries are in an environment of their own (``make lightning-env``, then
``.venv-lightning/bin/python -m tools.bench.lightning modules``). A name is that of a case (``gluonts.deepar``) or of a
library. ``--examples FOLDER`` adds the example programs of Lightning's repository, unmodified, from a copy of its folder
``examples``; the data that they would download is made locally, in the form that they read.

Each case runs in child processes with a time limit: on one device in plain Lightning, then on 2 stages; losses, logs,
results and final parameters are compared, in float64 where the module can do that. Exit code 1 if one is silently different
or crashes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from itertools import groupby

from tools.bench.lightning.modules_compare import BAD, Row
from tools.bench.lightning.modules_list import EXAMPLES, FAMILIES, names_of
from tools.bench.lightning.modules_run import rows

__all__ = ["main"]

_STATES = ("equal", "note", "refused", "flagged", "different", "crash", "broken", "missing")


def main(arguments: Sequence[str]) -> int:
    """Run the asked cases; print a line for each and a table of libraries."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.lightning modules", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases or libraries; all without")
    parser.add_argument("--examples", metavar="FOLDER", help="the folder `examples` of Lightning's repository")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each run of a case")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args(arguments)
    if options.examples:
        os.environ[EXAMPLES] = os.path.abspath(options.examples)
    known = names_of(options.examples)
    libraries = {name.partition(".")[0] for name in known}
    unknown = {*options.names} - {*known} - libraries
    if unknown:
        parser.error(f"{sorted(unknown)} are no cases and no libraries; there are {sorted(libraries)}")
    asked = [name for name in known if not options.names or {name, name.partition(".")[0]} & {*options.names}]
    found: list[Row] = []
    for library, names in groupby(asked, lambda name: name.partition(".")[0]):
        for row in rows(FAMILIES[library], list(names), options.limit):
            found.append(row)
            print(_line(row), flush=True)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump([dataclasses.asdict(row) for row in found], file, indent=1)
    return _summary(found)


def _line(row: Row) -> str:
    words = {"note": "equal with a note"}.get(row.state, row.state)
    figures = f"{row.steps:3} steps {row.difference:.0e}" if row.steps else ""
    return f"{row.name:38} {words:18} {row.seconds:6.1f} s {figures:17} {' | '.join(row.words)}"


def _summary(found: Sequence[Row]) -> int:
    """The table of libraries; 1 if a row is bad, or nothing was compared."""
    print("\n" + f"{'library':24}" + "".join(f"{state:>10}" for state in _STATES))
    libraries = [*dict.fromkeys(row.library for row in found)]
    for library in [*libraries, ""]:
        of = [row.state for row in found if library in ("", row.library)]
        title = library or f"all {len(libraries)}, {len(of)} cases"
        print(f"{title:24}" + "".join(f"{of.count(state) or '':>10}" for state in _STATES))
    tried = [row for row in found if row.state != "missing"]
    equal = [row for row in tried if row.state in ("equal", "note")]
    if tried:
        print(f"equal: {len(equal)} of {len(tried)} ({len(equal) / len(tried):.0%})")
    bad = [row.name for row in found if row.state in BAD]
    print(f"silently different, crashed or broken: {', '.join(bad) or 'none'}")
    return 1 if bad or not tried else 0
