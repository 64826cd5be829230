"""`pipepart bench schedules`: the table, a picture, and a clear error."""

from __future__ import annotations

import pytest

from pipepart.cli.main import main


def test_table_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schedules", "--stages", "4", "--microbatches", "8", "--chunks", "1", "2"]) == 0
    shown = capsys.readouterr().out
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"):
        assert name in shown
    assert main(["bench", "schedules", "--gantt", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("stage")]) >= 2


def test_unknown_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schedules", "--gantt", "1f2b"]) == 2
    assert "did you mean '1f1b'" in capsys.readouterr().err
