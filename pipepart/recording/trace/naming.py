"""How a torch function is written into a graph: by which name, and whether its outcome is certain."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.trace import intrinsics, ops

__all__ = ["certain", "name_of", "nameable", "outcome"]


def name_of(function: Any) -> str:
    try:
        return ops.DUNDERS.get(function) or str(getattr(function, "__name__", function))
    except TypeError:  # not hashable
        return str(getattr(function, "__name__", function))


def nameable(function: Any) -> Any:
    """`function`, or a plain function around it if fx cannot write its name into code."""
    try:
        name = fx.node._get_qualified_name(function)
        if name.startswith("torch."):  # fx trusts that such a name can be looked up
            found: Any = torch
            for part in name.split(".")[1:]:
                found = getattr(found, part)
            if found is not function:
                raise AttributeError(name)
        return function
    except Exception:
        return intrinsics.opaque_function(function, getattr(function, "__qualname__", type(function).__name__))


def certain(comparison: fx.Node) -> bool:
    """Whether a comparison of a uniform random number has one outcome only (a rate of 0 or 1)."""
    limits: list[Any] = [arg for arg in comparison.args if type(arg) in (int, float)]
    return len(limits) == 1 and bool(limits[0] <= 0 or limits[0] >= 1)


def outcome(comparison: fx.Node) -> bool:
    """The outcome of a certain comparison, without drawing the number."""
    name = comparison.target if isinstance(comparison.target, str) else comparison.target.__name__
    values = [arg if type(arg) in (int, float) else 0.5 for arg in comparison.args]
    return bool(getattr(operator, name.strip("_"))(*values))
