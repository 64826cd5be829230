"""The environment of jobs that tests start as programs of their own."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["job_environment", "short_imports"]

_START = str(Path(__file__).parent / "start")
"""A folder with a `sitecustomize`, which Python runs at the start of a program."""

_OF_A_LAUNCHER = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "PIPEPART_JOB",
}


def job_environment(**variables: str) -> dict[str, str]:
    """The environment of this process without the variables that a launcher or a Trainer has set in it."""
    kept = {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCHER and not k.startswith("TORCHELASTIC")}
    return short_imports({**kept, "OMP_NUM_THREADS": "1", **variables})


def short_imports(environment: dict[str, str]) -> dict[str, str]:
    """The environment for a program whose imports are shorter (`start/sitecustomize.py`)."""
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place and place != _START]
    return {**environment, "PYTHONPATH": os.pathsep.join([_START, *places])}
