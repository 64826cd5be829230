"""The few functions of our own that a recorded graph may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.recording import GuardError

__all__ = [
    "apply_function",
    "call_object",
    "changed",
    "check",
    "dropout_rate",
    "method_of",
    "opaque_function",
    "set_attribute",
]


def check(value: Any, expected: Any, text: str) -> None:
    """Stop if a value that the graph was specialised on is not what it was when the graph was recorded."""
    got = value.tolist() if isinstance(value, torch.Tensor) and not isinstance(expected, bool) else value
    if isinstance(expected, bool):
        got = bool(value)
    if got != expected and not (got != got and expected != expected):
        raise GuardError(f"{text}: was {expected} when the model was recorded, is {got}. Record again.")


def dropout_rate(rate: float, training: bool) -> float:
    """The dropout rate of a fused attention call in the current mode."""
    return rate if training else 0.0


def changed(tensor: Any, mutation: Any) -> Any:
    """`tensor` after an op has changed its memory: the same tensor, but it depends on that op."""
    return tensor


def call_object(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a callable that the graph reads as a constant."""
    return obj(*args, **kwargs)


def method_of(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a module that has state of its own (a metric)."""
    return getattr(module, name)(*args, **kwargs)


def set_attribute(module: Any, name: str, value: Any) -> None:
    """Keep a tensor as an attribute of a module, as the model itself does."""
    setattr(module, name, value)


fx.node._side_effectful_functions.update({check, method_of, set_attribute})

_functions: dict[Any, Callable[..., Any]] = {}


def apply_function(kind: Any) -> Callable[..., Any]:
    """The ``apply`` of a custom autograd function as a plain function with a stable name.

    It is torch's own: an ``apply`` that the class defines has had its say when the arguments were recorded.
    """
    if kind not in _functions:
        whole: Any = torch.autograd.Function.__dict__["apply"].__get__(None, kind)

        def apply(*args: Any, **kwargs: Any) -> Any:
            return whole(*args, **kwargs)

        apply.__name__ = apply.__qualname__ = f"{kind.__name__}_apply"
        apply.stable_name = f"{kind.__module__}.{kind.__qualname__}.apply"  # type: ignore[attr-defined]
        _functions[kind] = apply
    return _functions[kind]


def opaque_function(function: Any, name: str) -> Callable[..., Any]:
    """A callable that fx cannot name (a scripted function, a wrapper of a compiled one) as a plain function."""
    key = (function, name)
    if key not in _functions:

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        call.__name__ = call.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)
        call.stable_name = name  # type: ignore[attr-defined]
        _functions[key] = call
    return _functions[key]
