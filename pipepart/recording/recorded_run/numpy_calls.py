"""Functions of NumPy on tracked numbers: ``np.exp(-10 * batch_idx)``, ``np.minimum(loss.item(), 1)``, ``np.clip(n, 0, 1)``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch.utils._pytree as pytree

__all__ = ["TakenByNumpy"]

_COMPARISONS: dict[str, Callable[..., bool]] = {
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
    "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip
_OF_NUMBERS = (np.clip,)
"""Functions that are no `ufunc`, and give a number for numbers."""


class TakenByNumpy:
    """A tracked number as an argument of a function of NumPy.

    The result of numbers alone is tracked. Together with arrays, and in other functions, the value is fixed: the graph
    holds for this value only.
    """

    def __array_ufunc__(self, function: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        from pipepart.recording.recorded_run import symbols  # its classes are derived from this one

        if method == "__call__" and not options and function.nout == 1 and _numbers_to_follow(operands):
            compared = _COMPARISONS.get(function.__name__)
            return symbols.derive(_of_numbers(function), *operands) if compared is None else compared(*operands)
        return getattr(function, method)(*map(symbols.fixed, operands), **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from pipepart.recording.recorded_run import symbols

        if function in _OF_NUMBERS and not kwargs and _numbers_to_follow(args):
            return symbols.derive(_of_numbers(function), *args)
        args, kwargs = pytree.tree_map(symbols.fixed, (args, kwargs))
        return function(*args, **kwargs)


def _numbers_to_follow(operands: Any) -> bool:
    """Return whether all operands are numbers, of which functions of Python must keep track of at least one."""
    from pipepart.recording.recorded_run import symbols

    alone = all(isinstance(operand, (int, float, np.number)) for operand in operands)
    return alone and any(symbols.is_followed(operand) for operand in operands)


@cache
def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of NumPy that takes and gives numbers of Python."""

    def call(*numbers: Any) -> Any:
        return function(*numbers).item()

    call.__name__ = call.__qualname__ = f"numpy_{function.__name__}"
    return call
