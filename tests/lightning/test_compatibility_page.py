"""Each line of the compatibility page names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "compatibility.md"


def _feature_rows() -> list[str]:
    """The rows of all tables whose header begins with "feature"; other tables have figures."""
    rows, is_feature = [], False
    for before, line in zip(("", *(lines := PAGE.read_text().splitlines())), lines):
        if line.startswith("|") and not before.startswith("|"):
            is_feature = line.startswith("| feature")
        elif line.startswith("| ") and is_feature:
            rows.append(line)
    return rows


def test_every_line_is_backed_by_a_test() -> None:
    rows = _feature_rows()
    assert len(rows) > 120
    for row in rows:
        *_, test, _ = (cell.strip() for cell in row.split("|"))
        named = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test)
        assert named, f"no test is named: {row}"
        sources = [path.read_text() for path in TESTS.rglob(named[1])]
        assert any(f"def {named[2]}(" in source for source in sources), f"{named[0]} is not there: {row}"
