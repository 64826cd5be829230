"""Tensors in memory and in autograd's graph, and the tensors and tracked numbers in nested arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.recording.recorded_run import symbols

__all__ = [
    "gradient_edge",
    "has_tensor",
    "has_tracked",
    "holds_tensors",
    "is_same_memory",
    "reached",
    "storage_of",
    "tensors_in",
    "unwrap",
    "version_of",
]

_ATOMS = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Tensor, nn.Parameter})


def unwrap(value: Any) -> Any:
    """Return nested arguments with plain numbers in place of tracked ones."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, symbols.Tracked):
        return symbols.plain(value)
    if isinstance(value, torch.Size):
        return torch.Size([symbols.plain(item) for item in value])
    if isinstance(value, list) or type(value) is tuple:
        return (tuple if type(value) is tuple else list)(unwrap(item) for item in value)
    if type(value) is dict:
        return {key: unwrap(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(unwrap(value.start), unwrap(value.stop), unwrap(value.step))
    return value


def tensors_in(value: Any, found: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Return all tensors in nested arguments."""
    found = [] if found is None else found
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in _ATOMS:
        pass
    elif isinstance(value, (tuple, list)):
        for item in value:
            tensors_in(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            tensors_in(item, found)
    elif isinstance(value, slice):
        tensors_in((value.start, value.stop, value.step), found)
    return found


def has_tensor(value: Any) -> bool:
    """Return whether a result holds tensors, including attributes of an object."""
    if tensors_in(value):
        return True
    if type(value).__module__ == "numpy":
        return True
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and bool(tensors_in(vars(value)))


def holds_tensors(value: Any, depth: int) -> bool:
    """Return whether a value holds tensors within `depth` levels, including attributes of objects."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0:
        return False
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return any(holds_tensors(item, depth - 1) for item in value.values())
    if isinstance(value, (type, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    return any(holds_tensors(item, depth - 1) for item in vars(value).values())


def has_tracked(value: Any) -> bool:
    """Return whether a value, or an item of it, is a tracked number of a recording that is running."""
    if isinstance(value, (tuple, list)):
        return any(has_tracked(item) for item in value)
    if isinstance(value, dict):
        return any(has_tracked(item) for item in value.values())
    return symbols.is_tracked(value)


def storage_of(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors in the same memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return ("object", id(tensor))


def is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    if a is b:
        return True
    alike = (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and a.layout == b.layout == torch.strided
    return alike and (storage_of(a), a.storage_offset(), a.stride()) == (storage_of(b), b.storage_offset(), b.stride())


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def gradient_edge(tensor: torch.Tensor) -> Any:
    """Return the edge of autograd's graph for a tensor; None for a view that was made without gradients."""
    try:
        return torch.autograd.graph.get_gradient_edge(tensor)
    except AssertionError:
        return None


def reached(outs: list[torch.Tensor], edges: dict[Any, fx.Node]) -> set[fx.Node]:
    """Return the inputs that receive a gradient from these outputs, found by walking autograd's graph back."""
    if not edges:
        return set()
    found: set[fx.Node] = set()
    seen: set[Any] = set()
    todo: list[Any] = []
    for out in outs:
        if not out.requires_grad or out.is_inference():
            continue
        if out.grad_fn is not None:
            todo.append((out.grad_fn, out.output_nr))
        elif (edge := gradient_edge(out)) is not None:
            todo.append((edge.node, edge.output_nr))
    while todo:
        key = todo.pop()
        if key in seen or key[0] is None:
            continue
        seen.add(key)
        if key in edges:
            found.add(edges[key])
            continue
        todo.extend(key[0].next_functions)
    return found
