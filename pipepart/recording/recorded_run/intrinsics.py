"""Functions of this package that a recorded graph may call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.failures import GuardError

__all__ = [
    "apply_function",
    "call_object",
    "changed",
    "check",
    "dropout_rate",
    "failing_check",
    "method_of",
    "opaque_function",
    "set_attribute",
    "set_data",
]


def check(value: Any, expected: Any, text: str) -> None:
    """Raise a `GuardError` if a value that the graph was specialised on differs from its value in the recorded run."""
    got = value.tolist() if isinstance(value, torch.Tensor) and not isinstance(expected, bool) else value
    if isinstance(expected, bool):
        got = bool(value)
    if got != expected and not (got != got and expected != expected):
        raise GuardError(
            f"{text}: was {expected} when the model was recorded, is {got}. Record again, or write the branch with tensors "
            "(torch.where, torch.clamp, torch.maximum)."
        )


def dropout_rate(rate: float, training: bool) -> float:
    """Return the dropout rate of a fused attention call in the current mode."""
    return rate if training else 0.0


def changed(tensor: Any, mutation: Any) -> Any:
    """Return `tensor` itself. In the graph, the node depends on the op that has changed the memory of the tensor."""
    return tensor


def call_object(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a callable that the graph reads as a constant."""
    return obj(*args, **kwargs)


def method_of(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a module with its own state, such as a metric."""
    return getattr(module, name)(*args, **kwargs)


def set_attribute(module: Any, name: str, value: Any) -> None:
    """Keep a tensor as an attribute of a module, as the model itself does."""
    setattr(module, name, value)


def set_data(tensor: Any, value: Any) -> Any:
    """Give a tensor the values of another one, in memory of its own: what autograd has kept of the tensor stays as it is."""
    tensor.data = value.detach().clone()
    return tensor


fx.node._side_effectful_functions.update({check, method_of, set_attribute, set_data})

_functions: dict[Any, Callable[..., Any]] = {}


def apply_function(kind: Any) -> Callable[..., Any]:
    """Return the ``apply`` of a custom autograd function as a plain function with a stable name.

    This is the ``apply`` of torch: one that the class defines has already run when the arguments were recorded.
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
    """Return a callable that fx cannot name (such as a scripted function) as a plain function with a stable name."""
    key = (function, name)
    if key not in _functions:

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        call.__name__ = call.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)
        call.stable_name = name  # type: ignore[attr-defined]
        _functions[key] = call
    return _functions[key]


def failing_check(graph: fx.Graph, leaves: Sequence[Any]) -> str | None:
    """Return the message of the first failing check among those that depend only on sizes and numbers of the inputs."""
    known: dict[fx.Node, Any] = {}
    rest = iter(leaves)
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(rest)
        elif node.op in ("call_function", "call_method") and node.all_input_nodes:
            if any(source not in known for source in node.all_input_nodes):
                continue
            if node.target is not check and not op_of(node).is_number:
                continue
            args = fx.map_arg(node.args, lambda source: known[source])
            if isinstance(args[0], torch.Tensor) and node.target not in ("size", "numel", "stride"):
                continue
            try:
                call = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
                known[node] = call(*args[1:]) if node.op == "call_method" else call(*args)
            except GuardError as error:
                return str(error)
    return None
