"""The daemons of SLURM on the hosts of `tests/support/hosts.py`: a controller on the first one, and a node on each.

Each host has a key server (munge) and folders of its own, in memory. Nothing outside of the hosts is used or changed, and
everything ends with them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.hosts import Host, made_hosts, why_no_hosts

__all__ = ["Cluster", "started_cluster", "why_no_cluster"]

_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "squeue")
_OWN = "/dev/shm"  # each host has a file system of its own there
_CORES = 8
"""Cores of a node as SLURM sees it, so that jobs with several ranks fit on small machines."""
_PATIENCE = 120.0  # seconds in which the nodes must be ready

_SETTINGS = f"""
ClusterName=hosts
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={_OWN}/munge/socket
CredType=cred/munge
StateSaveLocation={_OWN}/slurmctld
SlurmdSpoolDir={_OWN}/slurmd
SlurmctldPidFile={_OWN}/slurmctld.pid
SlurmdPidFile={_OWN}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2
JobRequeue=1
KillWait=10
SlurmdParameters=config_overrides
"""


class Cluster:
    """A cluster that runs. All commands run on its first node."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts, self.folder = tuple(hosts), folder
        self._settings = folder / "slurm.conf"

    def start(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program on the first node, with its errors in its output."""
        given = dict(os.environ if environment is None else environment)
        return self.hosts[0].start(words, folder, {**given, "SLURM_CONF": str(self._settings)})

    def run(self, *words: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
        """Run a short program on the first node; returns what it prints."""
        program = self.start(words, folder or self.folder, environment)
        said: str = program.communicate(timeout=_PATIENCE)[0]
        if program.returncode:
            raise RuntimeError(f"{' '.join(words)} failed: {said.strip()}")
        return said

    def state(self, job: str) -> str:
        """The state of a job in the words of SLURM: PENDING, RUNNING, COMPLETED, TIMEOUT, ..."""
        found = dict(part.split("=", 1) for part in self.run("scontrol", "show", "job", job).split() if "=" in part)
        return found["JobState"]

    def logs(self) -> str:
        """The last lines of the logs of all daemons."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def _start_daemons(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        first = self.hosts[0]
        lines = [
            _SETTINGS,
            f"SlurmctldHost={first.name}({first.address})",
            f"SlurmctldLogFile={self.folder}/slurmctld.log",
            f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            *(f"NodeName={host.name} NodeAddr={host.address} CPUs={_CORES} State=UNKNOWN" for host in self.hosts),
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        self._settings.write_text("\n".join(lines) + "\n")
        for host in self.hosts:
            host.run("mkdir", "-p", *(f"{_OWN}/{name}" for name in ("munge", "slurmctld", "slurmd")))
            files = [f"--{name}-file={_OWN}/munge/{name}" for name in ("pid", "log", "seed")]
            host.run("munged", "--force", f"--socket={_OWN}/munge/socket", f"--key-file={key}", *files)
        variables = {**os.environ, "SLURM_CONF": str(self._settings)}
        first.start(["slurmctld", "-D"], self.folder, variables, subprocess.DEVNULL)
        for host in self.hosts:
            host.start(["slurmd", "-D", "-N", host.name], self.folder, variables, subprocess.DEVNULL)

    def _await_nodes(self) -> None:
        deadline, said = time.monotonic() + _PATIENCE, ""
        while f"{len(self.hosts)} idle" not in said:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes of SLURM are not ready ({said.strip()}).\n{self.logs()}")
            time.sleep(0.2)
            try:
                said = self.run("sinfo", "-h", "-o", "%D %T")
            except RuntimeError as error:  # the controller does not answer yet
                said = str(error)


@contextmanager
def started_cluster(folder: Path, nodes: int = 2) -> Iterator[Cluster]:
    """Start a cluster, and end it with all its jobs afterwards. `folder` gets its settings and logs."""
    folder.mkdir(parents=True, exist_ok=True)
    with made_hosts(nodes, named=True) as hosts:
        cluster = Cluster(hosts, folder)
        cluster._start_daemons()
        cluster._await_nodes()
        yield cluster


def why_no_cluster() -> str | None:
    """Return the reason why no cluster can be started here; None if it can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"SLURM is not installed ({missing[0]} is missing): make slurm"
    return why_no_hosts()
