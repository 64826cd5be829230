"""Runs a command, or a shell, on a cluster of SLURM that exists as long as the command (see `tools.slurm`)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.slurm.cluster import started_cluster, why_no_cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.slurm", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command on the first node; a shell without one")
    options = parser.parse_args()
    reason = why_no_cluster()
    if reason is not None:
        print(f"no cluster: {reason}", file=sys.stderr)
        return 2
    words = [word for word in options.command if word != "--"] or [os.environ.get("SHELL", "sh")]
    with tempfile.TemporaryDirectory(prefix="pipepart-slurm-") as name:
        with started_cluster(Path(name), options.nodes) as cluster:
            enter = ["nsenter", "--target", cluster.hosts[0].process, "--all", f"--wdns={os.getcwd()}", "--"]
            return subprocess.run([*enter, *words], env={**os.environ, "SLURM_CONF": f"{name}/slurm.conf"}).returncode


if __name__ == "__main__":
    sys.exit(main())
