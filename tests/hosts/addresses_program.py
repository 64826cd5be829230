"""Meets the agents of other hosts at an address, as `pipepart train launcher=nodes` does, and prints the error and its time."""

from __future__ import annotations

import sys
import time

from pipepart.cli.meeting_point import meet_agents
from pipepart.errors import PipepartError

if __name__ == "__main__":
    begun = time.monotonic()
    try:
        meet_agents(sys.argv[1], 29401, 2, int(sys.argv[2]))
    except PipepartError as error:
        print(f"{time.monotonic() - begun:.1f} {type(error).__name__}: {error}")
