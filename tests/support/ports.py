"""Ports for jobs that are told where to meet."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """A port that nobody listens on, from below the range in which systems give out ports by themselves.

    A port of that range may be taken by any connection of a test beside this one before the job has bound it.
    """
    chosen = random.SystemRandom()
    while True:
        port = chosen.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
