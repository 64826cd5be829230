"""Every benchmark can be imported, and the quick ones run. Their figures are for people to look at."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tools.bench.schedules.__main__ import main as schedules

BENCHES = sorted(path.parent.name for path in (Path(__file__).parents[1] / "tools" / "bench").glob("*/__main__.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    import_module(f"tools.bench.{name}.__main__")


@pytest.mark.parametrize(
    "words", [[], ["--gantt", "zb_v"], ["--speed"], ["--peers"]], ids=lambda words: "".join(words[:1])
)
def test_the_tables_of_schedules(monkeypatch, capsys, words: list[str]) -> None:
    small = ["--stages", "2", "--microbatches", "4"]
    monkeypatch.setattr("sys.argv", ["tools.bench.schedules", *words, *small])
    assert schedules() == 0
    assert len(capsys.readouterr().out.splitlines()) > 3
