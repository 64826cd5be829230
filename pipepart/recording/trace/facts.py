"""What is seen of an op while it is recorded."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.fx as fx

__all__ = [
    "Fact",
    "autocast_state",
    "gradient_edge",
    "is_same_memory",
    "outside_rng",
    "reached",
    "storage_of",
    "user_line",
    "version_of",
]


@dataclass
class Fact:
    """What was seen when a node was recorded."""

    module: str = ""
    module_class: str = ""
    source: str = ""
    tensor: torch.Tensor | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    nbytes: int = 0
    requires_grad: bool = False
    number: Any = None
    varies: bool = False
    random: bool = False
    chance: bool = False
    """Comes from random numbers alone: no input and no parameter has a part in it."""
    dynamic: bool = False
    stateful: bool = False
    from_data: bool = False
    grad_mode: bool = True
    autocast: tuple[Any, ...] = ()
    switches: tuple[Any, ...] = ()
    """Settings of the process, if they differ from those around the recording."""
    reads: set[Any] = field(default_factory=set)
    writes: set[Any] = field(default_factory=set)
    mutates: set[Any] = field(default_factory=set)
    differentiates: set[fx.Node] = field(default_factory=set)
    rows: tuple[tuple[int, ...], ...] = ()
    checkpoint: tuple[int, ...] = ()
    """The regions of activation checkpointing that it is in, the outermost first."""


def storage_of(tensor: torch.Tensor) -> Any:
    """A key that tensors share if they share memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return ("object", id(tensor))


def is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    if a is b:
        return True
    alike = (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and a.layout == b.layout == torch.strided
    return alike and (storage_of(a), a.storage_offset(), a.stride()) == (storage_of(b), b.storage_offset(), b.stride())


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def autocast_state() -> tuple[Any, ...]:
    """The autocast settings that ops see now."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )


def outside_rng() -> tuple[Any, ...]:
    """The states of the random numbers that torch does not know: Python's and numpy's."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, *rest = numpy_state
    return random.getstate(), name, keys.tobytes(), position, tuple(rest)


_TORCH = str(torch.__path__[0])
_HERE = __file__.rpartition("/trace/")[0]


def user_line() -> str:
    """File and line of the innermost frame that belongs neither to torch nor to us."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        short = _user_files.get(name)
        if short is None:
            ours = name.startswith((_TORCH, _HERE, "<"))
            short = _user_files[name] = "" if ours else name.rpartition("/")[2]
        if short:
            return f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_user_files: dict[str, str] = {}
"""Files seen in frames: the short name of a user's file, nothing for one of torch or ours."""


def gradient_edge(tensor: torch.Tensor) -> Any:
    """Where gradients of a tensor go in autograd's graph; None for a view that was made without gradients."""
    try:
        return torch.autograd.graph.get_gradient_edge(tensor)
    except AssertionError:
        return None


def reached(outs: list[torch.Tensor], edges: dict[Any, fx.Node]) -> set[fx.Node]:
    """Which inputs get a gradient from these outputs, by walking autograd's graph back to them."""
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
