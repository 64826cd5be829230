"""`python -m tools.bench.full_disk [WRITES]`: lets each of the last writes of a run be the first that fails.

As root, also on a small disk in memory that is filled at that moment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.bench.full_disk.runs import fill_disk, forbid_growth, loaded_step, train


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk of 64 MB in memory; None if it cannot be made."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    made = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield folder if made else None
    finally:
        if made:
            subprocess.run(["umount", str(folder)], check=True)


def _cases(root: Path, full: Callable[[Path], None], indices: list[int], names: tuple[str, ...]) -> list[str]:
    """Run each case and return the faults that were found."""
    faults = []
    for index in indices:
        folder = root / f"at-{index}"
        outcome = train(folder, index, full)
        (folder / "filler").unlink(missing_ok=True)
        try:
            step = loaded_step(folder)
        except Exception as error:
            step = -1
            faults.append(f"write {index} ({names[index]}): no checkpoint that loads: {error}")
        said = [line for line in outcome.output.splitlines() if "could not be written" in line]
        if not said:
            faults.append(f"write {index} ({names[index]}): no message\n{outcome.output}")
        row = {"write": index, "file": names[index], "exit": outcome.code, "checkpoint": step, "said": said[:1]}
        print(json.dumps(row), flush=True)
    return faults


def main(count: int) -> int:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        whole = train(root / "whole")
        assert whole.code == 0, whole.output
        print(json.dumps({"writes": whole.writes}), flush=True)
        last = list(range(len(whole.writes)))[-count:]
        faults = _cases(root, forbid_growth, last, whole.writes)
        for index in last:
            with _small_disk(root / f"disk-{index}") as disk:
                if disk is not None:
                    faults += _cases(disk, fill_disk, [index], whole.writes)
    print("\n".join(faults) if faults else f"a checkpoint that loads is there in all cases ({count} writes)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
