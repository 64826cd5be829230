"""The environment of jobs that tests start as programs of their own."""

from __future__ import annotations

import os

__all__ = ["job_environment"]

_OF_A_LAUNCHER = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "PIPEPART_JOB",
}


def job_environment(**variables: str) -> dict[str, str]:
    """The environment of this process without the variables that a launcher or a Trainer has set in it."""
    kept = {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCHER and not k.startswith("TORCHELASTIC")}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}
