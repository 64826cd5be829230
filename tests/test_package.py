"""The package as others get it: one version, classifiers of the Pythons that it allows, and no invented address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipepart

ROOT = Path(__file__).parents[1]
tomllib: Any = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "pipepart/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", pipepart.__version__)
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == pipepart.__version__
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first.group(1) == pipepart.__version__


def test_classifiers_begin_with_the_oldest_python_that_is_allowed() -> None:
    found = [name.rpartition(" ")[2] for name in PROJECT["project"]["classifiers"] if ":: Python :: 3." in name]
    assert found and f">={found[0]}" == PROJECT["project"]["requires-python"]
    assert [int(version.partition(".")[2]) for version in found] == list(range(10, 10 + len(found)))


def test_the_citation_has_what_the_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_release_page_names_every_extra_and_what_exists() -> None:
    page = (ROOT / "docs" / "releasing.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert rows == set(PROJECT["project"]["optional-dependencies"])
    makefile = (ROOT / "Makefile").read_text()
    assert all(
        f"\n{target}:" in makefile or f"{target} " in makefile for target in re.findall(r"`make ([\w-]+)`", page)
    )
    assert all((ROOT / path).exists() for path in re.findall(r"`((?:docs|tests|pipepart)/[\w./]+)`", page))
    benches = re.findall(r"python -m tools\.bench\.(\w+)", page)
    assert benches and all((ROOT / "tools" / "bench" / name / "__main__.py").is_file() for name in benches)


def test_what_the_sdist_lists_exists() -> None:
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [path for path in listed if not (ROOT / path.lstrip("/")).exists()] == []
