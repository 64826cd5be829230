"""Jobs on one host listen on loopback only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
from support.ports import free_port

from pipepart.errors import ConfigError
from pipepart.runtime.rendezvous import local_store

ROOT = Path(__file__).parents[2]
JOB = """
    import os
    from datetime import timedelta
    from pathlib import Path
    import torch.distributed as dist
    from pipepart.runtime.rendezvous import join_job

    join_job(timedelta(seconds=240))
    dist.barrier()
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                print("LISTENS", family, fields[1].split(":")[0])
    dist.barrier()
"""


@pytest.mark.slow
def test_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    port = free_port()
    kept = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**kept, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                 "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        output = "".join(job.communicate(timeout=240)[0] for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0]
    listening = {line.split()[-1] for line in output.splitlines() if line.startswith("LISTENS tcp ")}
    assert listening == {"0100007F"}  # 127.0.0.1
    assert "LISTENS tcp6" not in output


def test_other_hosts_are_left_to_torch() -> None:
    assert local_store("10.1.2.3", 29500, 0, 2, timedelta(seconds=1)) is None
    assert local_store("node-0", 29500, 1, 2, timedelta(seconds=1)) is None


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*MASTER_PORT"):
            local_store("127.0.0.1", port, 0, 2, timedelta(seconds=1))
