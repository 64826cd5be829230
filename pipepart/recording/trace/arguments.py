"""Nested arguments of calls: the tensors in them, and the bare numbers behind tracked ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.trace import symbols

__all__ = ["has_tensor", "has_tracked", "holds_tensors", "tensors_in", "unwrap"]


_ATOMS = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Tensor, nn.Parameter})


def unwrap(value: Any) -> Any:
    """Arguments with the bare numbers in place of tracked ones."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, symbols.Tracked):
        return symbols.plain(value)
    if isinstance(value, torch.Size):
        return torch.Size([symbols.plain(item) for item in value])
    if type(value) in (tuple, list):
        return type(value)(unwrap(item) for item in value)
    if type(value) is dict:
        return {key: unwrap(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(unwrap(value.start), unwrap(value.stop), unwrap(value.step))
    return value


def tensors_in(value: Any, found: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """All tensors in nested arguments."""
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
    """Whether a result holds tensors, also as attributes of an object."""
    if tensors_in(value):
        return True
    if type(value).__module__ == "numpy":
        return True
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and bool(tensors_in(vars(value)))


def holds_tensors(value: Any, depth: int) -> bool:
    """Whether a value holds tensors, also inside objects, down to `depth` levels."""
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
    """Whether a value, or an item of a nested one, is a number of the recording that is running."""
    if isinstance(value, (tuple, list)):
        return any(has_tracked(item) for item in value)
    if isinstance(value, dict):
        return any(has_tracked(item) for item in value.values())
    return symbols.is_tracked(value)
