"""Random states of a process, kept while something else draws random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipepart.lightning.namespaces import loaded

__all__ = ["isolate_rng"]


@contextmanager
def isolate_rng() -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python at the end, as `isolate_rng` of Lightning does."""
    lightning = loaded()
    states = lightning._collect_rng_states(True)
    try:
        yield
    finally:
        lightning._set_rng_states(states)
