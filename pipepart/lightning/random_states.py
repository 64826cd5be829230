"""Random states of a process, kept while something else draws random numbers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipepart.lightning.namespaces import loaded

__all__ = ["isolate_rng", "random_states", "same_random_states", "set_random_states"]


def random_states() -> dict[str, Any]:
    """The random states of torch, NumPy and Python."""
    states: dict[str, Any] = loaded()._collect_rng_states(True)
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the random states to what `random_states` has returned."""
    loaded()._set_rng_states(states)


def same_random_states(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two random states will draw the same numbers."""
    return pickle.dumps(_plain(a)) == pickle.dumps(_plain(b))


def _plain(state: Any) -> Any:
    """A random state without tensors and arrays."""
    if isinstance(state, dict):
        return {key: _plain(part) for key, part in state.items()}
    if isinstance(state, (list, tuple)):
        return [_plain(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state


@contextmanager
def isolate_rng() -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python at the end, as `isolate_rng` of Lightning does."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
