"""Numbers of the user's Python state as inputs of a graph: where they may be computed with, and where they are fixed."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree

from pipepart.recording.trace import symbols

__all__ = ["fixed_sizes"]

_SHAPED_BY_FLOATS = frozenset({"interpolate", "upsample", "arange", "range"})


def fixed_sizes(name: str, value: Any) -> Any:
    """Arguments of a call with those numbers fixed that may decide the form of its result: messages have fixed forms.

    Whole numbers may be sizes or indices; other numbers are not, but for a few functions.
    """

    def fix(number: Any) -> Any:
        if number.of_state and (isinstance(number.value, int) or name in _SHAPED_BY_FLOATS):
            return number.concrete()
        return number

    return pytree.tree_map_only(symbols.StepNumber, fix, value)
