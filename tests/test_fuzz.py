"""A few cases of each part of `python -m tools.bench.fuzz`: only a `PipepartError` comes out, and nothing is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipepart.errors import PlanError
from pipepart.machine import limits
from tools.bench.fuzz.cases import run_part
from tools.bench.fuzz.mutate import shrunk
from tools.bench.fuzz.parts import Part, make_parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Part]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_file", limits._file)  # the bench replaces it
        yield make_parts(tmp_path_factory.mktemp("fuzz"))


def test_a_few_cases_of_each_part(parts: list[Part]) -> None:
    for part in parts:
        outcome = run_part(part, 8 + part.weight, seed=1)
        assert not outcome.findings, next(iter(outcome.findings.values()))
        assert outcome.refused or "kept" in part.name or part.name in ("manifest", "result", "reason of a rank")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("plan()", {"keep_together": [[]]}),
        ("plan()", {"devices": 65_536}),
        ("pipepart train", {"strategy": {"timeout": "${oc.env:HOME}"}}),
    ],
)
def test_cases_that_the_bench_has_found(parts: list[Part], name: str, case: object) -> None:
    (part,) = (part for part in parts if part.name == name)
    found = Part(name, 1, lambda draw: case, part.run, limit=10.0)
    assert run_part(found, 1, seed=1).findings == {}


def test_findings_are_seen_and_made_small() -> None:
    def careless(case: list[int]) -> None:
        if 3 in case:
            raise KeyError(3)
        raise PlanError("refused")

    found = run_part(Part("careless", 1, lambda draw: [1, 2, 3, 4, 5], careless), 2, seed=1).findings
    assert [finding.case for finding in found.values()] == [[3]]
    starting = Part("starting", 1, lambda draw: 0, lambda case: subprocess.run([sys.executable, "-V"], check=False))
    assert list(run_part(starting, 1, seed=1).findings) == ["Started"]
    assert shrunk("a long text", lambda text: "g" in text) == "g"


def test_the_files_of_the_security_page_exist() -> None:
    root = Path(__file__).parents[1]
    words = (root / "docs" / "security.md").read_text().replace("`", " ").replace(",", " ").split()
    named = {word for word in words if word.startswith("tests/")}
    assert named
    assert [name for name in sorted(named) if not (root / name).is_file()] == []
