"""A process that has talked to others ends with exit code 0, also while threads of gloo still let go of tensors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.environment import job_environment

ROOT = Path(__file__).parents[2]
JOB = """
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from pipepart.runtime.mesh import Groups, Mesh

    rank, store = int(sys.argv[1]), sys.argv[2]
    limit = timedelta(seconds=200)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit)
    groups = Groups.create(Mesh(1, 2), limit)
    held = [groups.pipeline] if rank == 0 else None  # other code may hold a group until the process ends
    dist.barrier()
    for _ in range(300):  # the last ones are done while Python shuts down
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor, group=groups.pipeline, async_op=True)
        del tensor
    print("trained", flush=True)
"""


@pytest.mark.slow
def test_no_abort_at_exit(tmp_path: Path) -> None:
    """One process holds a group until it ends, the other does not. Without an orderly end, nearly every run aborts."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    words = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "store")],
            env=job_environment(PYTHONPATH=str(ROOT)),
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
