"""A process that has talked to others ends with exit code 0, also while threads of gloo still let go of tensors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = """
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from pipepart.runtime.mesh import Groups, Mesh

    rank, store, keep = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "keep"
    limit = timedelta(seconds=200)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit)
    groups = Groups.create(Mesh(1, 2), limit)
    held = [groups.pipeline] if keep else None  # somebody else may hold a group for ever
    dist.barrier()
    for _ in range(300):  # the last ones are done while Python shuts down
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor, group=groups.pipeline, async_op=True)
        del tensor
    print("trained", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["keep", "drop"])
def test_no_abort_at_exit(tmp_path: Path, keep: str) -> None:
    """Without an orderly end nearly every one of these aborts: "terminate called without an active exception"."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    words = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "store"), keep],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said == ["trained\n"] * 2
