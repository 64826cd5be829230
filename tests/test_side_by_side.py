"""Tests that share something run in one worker, whatever versions of pytest and pytest-xdist there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.long_tests import LONG

CONFTEST = """
from support.side_by_side import *
"""
TESTS = """
import os
import pytest

@pytest.fixture(scope="module")
def shared():
    with open("started", "a") as file:
        file.write("once ")

@pytest.mark.slow
@pytest.mark.parametrize("case", range(8))
def test_shared(shared, case):
    pass

def note(case):
    with open(f"worker-{case}", "w") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"])

@pytest.mark.slow
def test_here():
    note(0)

@pytest.mark.slow
@pytest.mark.timeout(99)
@pytest.mark.xdist_group("apart")
def test_apart():
    note(1)

@pytest.mark.parametrize("case", range(3))
def test_quick(case):
    pass
"""


@pytest.mark.slow
def test_files_stay_together_and_groups_are_dealt_out(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope"],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "13 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "started").read_text() == "once "
    assert {(tmp_path / f"worker-{case}").read_text() for case in range(2)} == {"gw0", "gw1"}


def test_long_tests_exist() -> None:
    for name in LONG:
        file, function = name.split("[")[0].split("::")
        source = (Path(__file__).parents[1] / file).read_text()
        assert f"def {function}(" in source, name
