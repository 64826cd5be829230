"""The ops of a recorded graph by plain names and arguments: `a + b`, `torch.add(a, b)` and `a.add_(b)` are one op."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch.fx as fx

__all__ = ["argument", "dims_of", "name_of", "operands"]

_HOMES = ("torch", "_operator", "builtins", "math")
_SAME = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg",
    "itruediv": "div", "iadd": "add", "isub": "sub", "imul": "mul", "radd": "add", "rmul": "mul", "rtruediv": "rdiv",
    "rdiv": "rdiv", "rsub": "rsub", "concat": "cat", "concatenate": "cat", "clamp_min": "clamp",
}  # fmt: skip


def name_of(node: fx.Node) -> str:
    """The name of the op of torch or Python that a node calls; empty for calls of anything else."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target: Any = node.target
        home = str(getattr(target, "__module__", None) or "torch")
        if hasattr(target, "stable_name") or home.partition(".")[0] not in _HOMES:
            return ""
        name = str(getattr(target, "__name__", ""))
    else:
        return ""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    elif name.endswith("_") and not name.startswith("_"):
        name = name[:-1]  # in place
    return _SAME.get(name, name)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, however it was passed; a method's own tensor is at position 0."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def operands(node: fx.Node) -> tuple[Any, Any]:
    """The two operands of an arithmetic op, in the order of the arithmetic."""
    first, second = argument(node, 0, "input"), argument(node, 1, "other")
    return (second, first) if name_of(node) in ("rsub", "rdiv") else (first, second)


def dims_of(node: fx.Node, rank: int) -> tuple[int, ...] | None:
    """The dimensions that a reduction goes over, counted from the front; None: they are not plain numbers."""
    dims = argument(node, 1, "dim", node.kwargs.get("axis"))
    if dims is None or dims in ((), []):
        return tuple(range(rank))
    wanted: list[Any] = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, (tuple, list)) else [None]
    if any(type(dim) is not int for dim in wanted):
        return None
    return tuple(sorted(dim % rank if rank else dim for dim in wanted))


@cache
def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of the parameters of a Python function."""
    return tuple(inspect.signature(function).parameters)
