"""Ports of this machine that jobs use."""

from __future__ import annotations

__all__ = ["JOB_PORTS"]

JOB_PORTS = range(20_000, 32_000)
"""Ports where the ranks of a job meet, below those that Linux gives to connections of any program (32768 and above)."""
