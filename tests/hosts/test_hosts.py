"""The hosts of these tests themselves: addresses, names, clocks, disks, cables, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.hosts import made_hosts

CONNECT = "import socket, sys; print(socket.create_connection((sys.argv[1], 8000), 2).getsockname()[0])"
LISTEN = """
import socket
server = socket.create_server(('0.0.0.0', 8000))
print('ready', flush=True)
while True:
    server.accept()
"""
KEEP = """
import sys, time
sys.path.insert(0, sys.argv[1])
from support.hosts import made_hosts
with made_hosts(2) as hosts:
    hosts[1].start(["sleep", "1001"])
    print(*(host.process for host in hosts), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_host_has_what_it_is_told(tmp_path: Path) -> None:
    """Only the test's own namespaces are reached; a cut cable carries nothing, and a mended one does."""
    with made_hosts(2, rate="100mbit", clocks=(0, 1000), named=True, disk=tmp_path) as (one, two):
        assert (one.run("hostname").strip(), two.address) == ("h1", "10.77.0.2")
        assert "10.77.0.2 h2" in one.run("cat", "/etc/hosts") and "127.0.1.1 h1" in one.run("cat", "/etc/hosts")
        assert "rate 100Mbit" in one.run("tc", "qdisc", "show", "dev", "net0")
        clock = [sys.executable, "-c", "import time; print(time.monotonic())"]
        assert float(two.run(*clock)) - float(one.run(*clock)) > 900
        two.run("touch", str(tmp_path / "of-two"))
        assert [path.name for path in (tmp_path / "h2").iterdir()] == ["of-two"] and not list(
            (tmp_path / "h1").iterdir()
        )
        server = two.start([sys.executable, "-c", LISTEN])
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        connect = [sys.executable, "-c", CONNECT, two.address]
        assert one.run(*connect).strip() == one.address
        two.cut()
        with pytest.raises(RuntimeError, match=r"timed out|No route|unreachable"):
            one.run(*connect)
        two.mend()
        assert one.run(*connect).strip() == one.address
        two.end()
        assert server.returncode == -signal.SIGKILL


def test_hosts_end_with_the_process_that_has_made_them() -> None:
    words = [sys.executable, "-c", KEEP, str(Path(__file__).parents[1])]
    maker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    processes = [int(number) for number in maker.stdout.readline().split()]
    assert len(processes) == 2 and all(map(_runs, processes))
    networks = [os.stat(f"/proc/{number}/ns/net").st_ino for number in processes]
    maker.kill()
    maker.wait()
    maker.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(_runs, processes)) or _inside(networks):
        assert time.monotonic() < deadline, "a host was left"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")


def _inside(networks: list[int]) -> list[str]:
    """The processes in these networks, also those that programs of a host have started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.stat(folder / "ns" / "net").st_ino in networks:
                found.append(folder.name)
        except OSError:
            continue
    return found
