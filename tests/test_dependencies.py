"""The dependencies: pyproject.toml declares what is imported, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

tomllib: Any = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "pyyaml", "PIL": "pillow"}
"""Where the name of a distribution is not that of its package."""
OWN = {"pipepart", "recipes", "tools"}
WITH_A_WORD = {"pillow", "transformers", "peft", "huggingface_hub"}
"""Recipes import these themselves and say what to install where they are missing, or are named after them."""


def _imported(folder: str) -> dict[str, str]:
    """The distributions that the files of a folder import, each with one of the places."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
            package = name.partition(".")[0]
            if package not in sys.stdlib_module_names and package not in OWN:
                found[DISTRIBUTIONS.get(package, package)] = str(path.relative_to(ROOT))
    return found


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _extra(name: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in project["optional-dependencies"][name]}


def _declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in project["dependencies"]}


def test_what_the_package_imports_is_declared():
    known = _declared() | _extra("ray") | _extra("export")
    missing = {name: place for name, place in _imported("pipepart").items() if name not in known}
    assert not missing


def test_what_is_declared_is_imported():
    assert _declared() - set(_imported("pipepart")) == set()


def test_recipes_need_no_more():
    assert set(_imported("recipes")) - _declared() <= WITH_A_WORD


def test_every_dependency_has_a_tested_version():
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert _declared() | _extra("ray") | _extra("export") <= pinned
