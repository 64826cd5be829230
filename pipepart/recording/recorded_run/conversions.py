"""``float`` and ``int`` in a recorded run: of a tensor or a tracked number they make a tracked number.

Python itself would make a plain number, whose origin is lost. The classes here stand for `float` and `int` while a call
runs that needs them; for all other values they are those of Python.
"""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import torch

from pipepart.recording.recorded_run import symbols
from pipepart.recording.recorded_run.numbers import NumberRecorder

__all__ = ["conversions", "with_plain_dtype"]


class Kind(type):
    """The class of the two stand-ins: instance checks, comparisons and attributes are those of the original."""

    original: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(value, torch.Tensor):
            value = value.item()
        if symbols.is_tracked(value):
            return value if type(symbols.plain(value)) is cls.original else symbols.derive(cls.original, value)
        return cls.original(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __eq__(cls, other: Any) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


class _Float(metaclass=Kind):
    original = float
    dtype = np.dtype(float)  # so that numpy takes it as a dtype


class _Int(metaclass=Kind):
    original = int
    dtype = np.dtype(int)


def with_plain_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments in which a stand-in as a ``dtype`` is the type of Python again, which torch takes as a dtype."""
    kind = kwargs.get("dtype")
    return {**kwargs, "dtype": kind.original} if isinstance(kind, Kind) else kwargs


def conversions(numbers: NumberRecorder) -> list[tuple[Any, str, Any]]:
    """Return the patches of Python's builtins, if the run follows the results of ``float`` and ``int``."""
    if not numbers.converting:
        return []
    return [(builtins, "float", _Float), (builtins, "int", _Int)]
