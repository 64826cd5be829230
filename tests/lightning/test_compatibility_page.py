"""Each line of the compatibility page names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "compatibility.md"


def test_every_line_is_backed_by_a_test() -> None:
    rows = [
        line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| feature")
    ]
    assert len(rows) > 40
    for row in rows:
        *_, test, _ = (cell.strip() for cell in row.split("|"))
        named = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test)
        assert named, f"no test is named: {row}"
        sources = [path.read_text() for path in TESTS.rglob(named[1])]
        assert any(f"def {named[2]}(" in source for source in sources), f"{named[0]} is not there: {row}"
