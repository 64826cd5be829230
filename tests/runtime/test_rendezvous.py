"""Jobs on one host meet in a private file and listen on loopback only."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.environment import short_imports

from pipepart.errors import ConfigError, PipelineError
from pipepart.runtime import Groups, Mesh, rendezvous
from pipepart.runtime.addresses import free_port
from pipepart.runtime.port_store import abandoned_if, reached_store
from pipepart.runtime.rendezvous import job_folder, meeting_store
from pipepart.runtime.signing import signed, verified

ROOT = Path(__file__).parents[2]
LIMIT = timedelta(seconds=60)
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
            env=short_imports(
                {**kept, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                 "PYTHONPATH": str(ROOT)}
            ),
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


def test_an_address_of_another_network_is_served_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that no interface of this host has may be translated to it. Then the store listens on all addresses."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")  # by the user
    port = free_port()
    store = meeting_store("192.0.2.199", port, 0, 2, LIMIT)
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        store.set("key", "value")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"


@pytest.mark.parametrize("slurm", [False, True])
@pytest.mark.slow
def test_a_host_that_does_not_resolve_is_named_at_once(monkeypatch: pytest.MonkeyPatch, slurm: bool) -> None:
    """Torch tries to connect until its timeout."""
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    begun = time.monotonic()
    source = "SLURM_JOB_NODELIST" if slurm else "comes from MASTER_ADDR"
    with pytest.raises(ConfigError, match=f"'no-such-host.invalid'.*does not resolve.*{source}"):
        meeting_store("no-such-host.invalid", 29500, 1, 2, timedelta(seconds=600))
    assert time.monotonic() - begun < 60


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*MASTER_PORT"):
            meeting_store("127.0.0.1", port, 0, 2, LIMIT)


def _together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [call.result(60) for call in [threads.submit(call) for call in calls]]


def test_ranks_meet_in_a_private_folder_that_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        first, second = _together(*(partial(meeting_store, "", 0, rank, 2, LIMIT, True) for rank in range(2)))
        assert not os.path.exists(folder)  # a job that is killed leaves nothing behind
        first.set("key", "value")
        assert second.get("key") == b"value"
        again = _together(*(partial(meeting_store, "", 0, rank, 2, LIMIT, True) for rank in range(2)))
        assert not again[0].check(["key"]), "a second initialisation begins with an empty store"
    assert "PIPEPART_JOB" not in os.environ


def test_ranks_without_a_common_folder_leave_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    first, second = _together(*(partial(meeting_store, "127.0.0.1", port, rank, 2, LIMIT) for rank in range(2)))
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert isinstance(first, dist.FileStore)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_ranks_with_separate_folders_stay_on_the_port_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers on one host may have separate file systems. Without a token, everyone could bring a job to the port."""
    monkeypatch.setattr(rendezvous, "_file_store", lambda folder: os.stat(f"{folder}/not-here"))

    def meet() -> list[Any]:
        port = free_port()
        return _together(*(partial(meeting_store, "127.0.0.1", port, rank, 2, LIMIT) for rank in range(2)))

    with pytest.raises(ConfigError, match=r"no private folder in common: rank 0, 1 cannot open .*set PIPEPART_TOKEN"):
        meet()
    monkeypatch.setenv("PIPEPART_TOKEN", "a secret")
    first, second = meet()
    first.set("key", "value")
    assert second.get("key") == b"value"


class _Overwritten(dict[str, bytes]):
    """A store in which another user has replaced the name of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder).encode()

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self._folder if key == "folder" else self[key]


@pytest.mark.parametrize("mode", [0o755, 0o700])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_a_stranger_names_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, rank: int
) -> None:
    named, made = tmp_path / "home", tmp_path / "made"
    named.mkdir(mode=mode)
    (named / "precious").touch()
    made.mkdir(mode=0o700)
    store = _Overwritten(named)
    store.set(f"opened/{1 - rank}", "no")
    monkeypatch.setattr(rendezvous, "_private_folder", lambda: str(made))
    monkeypatch.setattr(rendezvous, "_numbered", lambda store, rank: store)
    with pytest.raises(ConfigError, match="no private folder in common"):
        rendezvous._moved(store, rank, 2, LIMIT)  # type: ignore[arg-type]
    assert (named / "precious").exists()
    assert made.exists() is (rank == 1)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    open_to_all, link = tmp_path / "open", tmp_path / "link"
    open_to_all.mkdir(mode=0o755)
    link.symlink_to(open_to_all)
    with pytest.raises(PermissionError, match="is not private"):
        rendezvous._file_store(str(open_to_all))
    with pytest.raises(OSError):
        rendezvous._file_store(str(link))
    if os.getuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 65534, 65534)
        with pytest.raises(PermissionError, match="is not private"):
            rendezvous._file_store(str(foreign))


def test_one_process_needs_no_port() -> None:
    assert isinstance(meeting_store("node-0", 29500, 0, 1, LIMIT), dist.HashStore)


def test_objects_without_the_signature_of_the_job_are_not_read() -> None:
    groups = Groups(Mesh(1, 2), 0, *[None] * 6, key=b"k" * 32)  # type: ignore[arg-type]
    data = signed({"a": [1, 2]}, groups)
    assert verified(data, groups) == {"a": [1, 2]}
    for wrong in (data[:-1], data[1:], b"", pickle.dumps(print), bytes(32) + data[32:]):
        with pytest.raises(PipelineError, match="no rank of this job has signed"):
            verified(wrong, groups)


def test_a_port_of_another_program_is_not_waited_for() -> None:
    """It takes the connection and says nothing. torch alone would wait for its answer without a limit."""
    here = ["127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"on 127.0.0.1 port {port} is no store of torch.* comes from MASTER_PORT"
        ):
            reached_store(here, port, timedelta(seconds=1), "MASTER_PORT")
        failed = "cannot listen on the port"
        with abandoned_if(lambda: None), abandoned_if(lambda: failed), pytest.raises(PipelineError, match=failed):
            reached_store(here, port, LIMIT, "MASTER_PORT")
    with abandoned_if(lambda: failed), pytest.raises(PipelineError, match=failed):
        reached_store(here, free_port(), LIMIT, "MASTER_PORT")  # nothing listens there
