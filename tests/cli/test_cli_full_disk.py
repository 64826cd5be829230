"""A disk that becomes full near the end of a run: a checkpoint that loads is there, and the message names the file.

`python -m tools.bench.full_disk` does it for each of the last ten writes.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.environment import job_environment

PROGRAM = """
import json, sys
from pathlib import Path
from tools.bench.full_disk.runs import loaded_step, train
root = Path(sys.argv[1])
whole = train(root / "whole")
names = [name.split(".")[0] for name in whole.writes]
last = len(names) - 1
cases = {
    "checkpoint": last - names[::-1].index("checkpoints/last"),
    "report": names.index("report"),
}
print(json.dumps({"case": "whole", "code": whole.code, "names": names, "step": loaded_step(root / "whole")}))
for case, index in cases.items():
    outcome = train(root / case, index)
    step = loaded_step(root / case)
    print(json.dumps({"case": case, "code": outcome.code, "output": outcome.output, "step": step}))
"""


class _Full:
    """An output on a full disk."""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_output_that_cannot_be_written_does_not_lose_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning writes the last checkpoint after `on_train_end` of all other callbacks."""
    from pipepart.cli.fit import Progress

    progress, trainer = Progress(), SimpleNamespace(is_global_zero=True, global_step=3)
    monkeypatch.setattr(progress, "get_metrics", lambda trainer, module: {"loss": 0.5})
    monkeypatch.setattr(sys, "stdout", _Full())
    progress.on_train_end(trainer, None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_full_disk_at_the_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=job_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = {
        row["case"]: row for row in map(json.loads, filter(lambda line: line.startswith("{"), done.stdout.splitlines()))
    }
    whole = found["whole"]
    assert whole["code"] == 0
    assert whole["step"] == 6
    names = whole["names"]
    assert names.count("checkpoints/last") == 3, "at every validation"
    assert max(i for i, name in enumerate(names) if "last" in name) < names.index("trace"), "before all reports"
    failed = found["checkpoint"]
    assert failed["code"] == 1
    assert failed["step"] == 4
    assert "last.ckpt could not be written" in failed["output"]
    assert "The previous checkpoint is untouched" in failed["output"]
    row = found["report"]
    assert row["code"] == 0, row
    assert row["step"] == 6
    for name in ("report.html", "result.json"):
        assert row["output"].count(f"{name} could not be written: ") == 1, row["output"]
    assert [p.name for p in tmp_path.rglob("*.part")] == []
    assert not (tmp_path / "report" / "report.html").exists()
    assert os.path.exists(tmp_path / "report" / "plan.json")
