"""The architecture page: every path on it exists, and every room of the package is on it."""

from __future__ import annotations

import re
from pathlib import Path

from test_imports import ORDER

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PATH = re.compile(r"`((?:pipepart|tests|conf|recipes|tools|docs)/[\w./]*)`")


def named_paths(text: str) -> set[str]:
    """The paths in backquotes; a name in capitals stands for any."""
    return {path for path in PATH.findall(text) if "NAME" not in path}


def test_every_path_exists() -> None:
    paths = named_paths(PAGE.read_text())
    assert len(paths) > 50
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing, f"{PAGE.name} names {missing}, which are not there"


def test_every_path_is_in_backquotes() -> None:
    """So that the check sees it."""
    text = PAGE.read_text()
    outside = re.findall(r"(?<![`\w/])(?:pipepart|tests)/[\w./]+", text)
    assert not outside, f"write {outside} in backquotes"


def test_every_room_is_named() -> None:
    rows = {
        path
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `pipepart/")
        for path in PATH.findall(line.split("|")[1])
    }
    rooms = {
        path.name for path in (ROOT / "pipepart").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    rooms -= {"__init__.py"}
    assert {Path(path).name for path in rows} == rooms


def test_the_order_of_imports_is_that_of_the_test() -> None:
    text = " ".join(PAGE.read_text().split())
    assert ", ".join(f"`{room}`" for room in ORDER) in text


def test_the_check_sees_paths() -> None:
    assert named_paths("`pipepart/gone.py` and `tests/x.py`, not `conf/model/NAME.yaml`") == {
        "pipepart/gone.py",
        "tests/x.py",
    }
