"""The leaves of a call as inputs of a recording: their kinds and names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.recording.recorded import Input

__all__ = ["describe_leaf", "named", "short_path"]


def describe_leaf(leaf: Any, path: str, numbers: bool) -> Input:
    """Return the `Input` of one leaf. With `numbers`, Python numbers may change from call to call."""
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in path).strip("_") or "x"
    name = name if not name[0].isdigit() else f"x_{name}"
    if isinstance(leaf, torch.Tensor):
        return Input(name, path, "tensor", tuple(leaf.shape), leaf.dtype, None, (False,) * leaf.dim())
    if numbers and isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
        return Input(name, path, "number")
    return Input(name, path, "constant", value=leaf)


def named(inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Return the inputs with the names of their nodes, which are unique and differ from Python builtins such as `input`."""
    graph = fx.Graph()
    return tuple(dataclasses.replace(spec, name=graph.placeholder(spec.name).name) for spec in inputs)


def short_path(target: Any, path: str) -> str:
    """Return the path ``[0][1]['x']`` in (args, kwargs), beginning with the name of the parameter."""
    head, _, rest = path[1:].partition("]")
    key, _, tail = rest[1:].partition("]")
    if head == "1":
        return key.strip("'\"") + tail
    try:
        function = target.forward if isinstance(target, nn.Module) else target
        parameters = list(inspect.signature(function).parameters.values())
        parameter = parameters[int(key)]
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return parameter.name + tail
    except (TypeError, ValueError, IndexError):
        pass
    return f"args[{key}]{tail}"
