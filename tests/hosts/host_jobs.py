"""Jobs on hosts for the tests of this folder: the same program on each host, and its ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support.environment import job_environment
from support.hosts import Host

__all__ = ["PATIENCE", "both_ended", "listening", "on_each", "torchrun", "train_on"]

PATIENCE = 360  # seconds; a busy machine takes long to import


def on_each(
    hosts: Sequence[Host], words: Sequence[Sequence[str]], folder: Path, **environment: str
) -> list[subprocess.Popen[str]]:
    """Start a Python program on each host, with the words for it."""
    return [
        host.start([sys.executable, *own], folder, job_environment(**environment)) for host, own in zip(hosts, words)
    ]


def torchrun(hosts: Sequence[Host], ranks: int, words: Sequence[str], folder: Path) -> list[subprocess.Popen[str]]:
    """As in the README: `torchrun --nnodes N --node-rank I --master-addr ADDRESS` on each host."""
    where = ["--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks), "--master-addr", hosts[0].address]
    where += ["--master-port", "29400"]
    each = [["-m", "torch.distributed.run", *where, "--node-rank", str(node), *words] for node in range(len(hosts))]
    return on_each(hosts, each, folder)


def train_on(
    hosts: Sequence[Host], address: str, ranks: int, words: Sequence[str], folder: Path, **environment: str
) -> list[subprocess.Popen[str]]:
    """As in the README: the same `pipepart train launcher=nodes launcher.address=ADDRESS` on each host."""
    where = ["launcher=nodes", f"launcher.nodes={len(hosts)}", f"launcher.address={address}", f"devices={ranks}"]
    return on_each(hosts, [["-m", "pipepart.cli", "train", *words, *where]] * len(hosts), folder, **environment)


def both_ended(programs: Sequence[subprocess.Popen[str]], limit: float = PATIENCE) -> list[str]:
    """Wait for the programs and return what each has printed."""
    deadline = time.monotonic() + limit
    return [program.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for program in programs]


def listening(host: Host) -> set[str]:
    """The addresses on which processes of a host listen."""
    found = set()
    for line in host.run("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines():
        fields = line.split()
        if fields[3] == "0A":
            number = fields[1].partition(":")[0]
            short = len(number) == 8
            found.add(".".join(str(byte) for byte in reversed(bytes.fromhex(number))) if short else number)
    return found
