"""The outcome of one run of a model, a step or a recording: outputs, buffers and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.recorded_run.tensors import storage_of

__all__ = ["Outcome", "backward_roots", "compact", "gradients_of", "outcome_of"]

_LARGE = 1 << 20
"""Number of elements above which a gradient is kept as sums over its rows and columns, which need little memory."""


@dataclass(frozen=True)
class Outcome:
    """Flat outputs, buffers and gradients of one run; large gradients are kept as sums."""

    values: list[Any]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gradients: Mapping[str, torch.Tensor | None] | None = None
    """Gradients by the name of the parameter or input; None if no backward was run."""
    failure: str = ""
    """The error of a backward that failed."""


def outcome_of(
    values: Sequence[Any],
    loss: int | None,
    root: nn.Module,
    inputs: Mapping[str, Any],
    backward: bool,
    retain: bool = False,
) -> Outcome:
    """Run backward from the outputs of a finished run and collect its outcome. ``.grad`` stays as it is.

    `inputs` are the input leaves by name; the outcome has gradients of those that require one. With `retain`, autograd's
    graph is kept.
    """
    failure, gradients = "", None
    roots, cotangents = backward_roots(values, loss) if backward else ([], [])
    if roots:
        wanted: dict[str, torch.Tensor] = {name: p for name, p in root.named_parameters() if p.requires_grad}
        wanted |= {f"input {name}": v for name, v in inputs.items() if isinstance(v, torch.Tensor) and v.requires_grad}
        try:
            found = gradients_of(roots, cotangents, wanted, retain)
            gradients = {name: None if g is None else compact(g) for name, g in found.items()}
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error)[:300]}"
    buffers = {name: buffer.detach().clone() for name, buffer in root.named_buffers()}
    memory = {storage_of(buffer) for buffer in root.buffers()}
    kept = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
    for i, value in enumerate(kept):
        if isinstance(value, torch.Tensor) and storage_of(value) in memory:
            kept[i] = value.clone()
    return Outcome(kept, buffers, gradients, failure)


def backward_roots(values: Sequence[Any], loss: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs that backward starts from, and their gradients: 1 for a loss, else fixed pseudo-random numbers."""
    if loss is not None:
        root = values[loss]
        return ([root], [torch.ones_like(root)]) if root.requires_grad else ([], [])
    roots, cotangents = [], []
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_inference():
            roots.append(value)
            cotangents.append(_pseudo_random(value, i))
    return roots, cotangents


def _pseudo_random(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = like.dtype if like.is_complex() else torch.float32
    return torch.randn(like.shape, generator=generator, dtype=dtype).to(like.device, like.dtype)


def gradients_of(
    roots: list[torch.Tensor], cotangents: list[torch.Tensor], wanted: dict[str, torch.Tensor], retain: bool = False
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of tensors by name. The hooks of these tensors do not run, and ``.grad`` stays as it is."""
    if not wanted:
        return {}
    with _without_hooks(wanted.values()):
        if _is_reentrant(roots):
            found: Any = _accumulated(roots, cotangents, wanted)
        else:
            found = torch.autograd.grad(
                roots, list(wanted.values()), cotangents, allow_unused=True, retain_graph=retain
            )
    return {name: None if g is None else g.detach() for name, g in zip(wanted, found)}


def _is_reentrant(roots: list[torch.Tensor]) -> bool:
    """Return whether backward reaches a region of reentrant checkpointing, which gives gradients only through ``.grad``."""
    todo: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if function.name() == "CheckpointFunctionBackward":
            return True
        todo.extend(source for source, _ in function.next_functions)
    return False


def _accumulated(
    roots: list[torch.Tensor], cotangents: list[torch.Tensor], wanted: dict[str, torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients that are taken from ``.grad``, for reentrant checkpointing inside a module that is one op."""
    before = [tensor.grad if tensor.is_leaf else None for tensor in wanted.values()]
    try:
        for tensor in wanted.values():
            tensor.grad = None
            if not tensor.is_leaf:
                tensor.retain_grad()
        torch.autograd.backward(roots, cotangents)
        return tuple(tensor.grad for tensor in wanted.values())
    finally:
        for tensor, gradient in zip(wanted.values(), before):
            tensor.grad = gradient


@contextmanager
def _without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Remove the hooks of tensors: hooks of parameters see whole gradients, in a recording as in the model."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    found = (hooks for tensor in tensors for name in names if (hooks := getattr(tensor, name, None)))
    saved = [(hooks, dict(hooks)) for hooks in found]
    for hooks, _ in saved:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in saved:
            hooks.update(items)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor for comparisons: itself or, if it is large, its norm and its sums over rows and columns."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.numel() <= _LARGE:
        return tensor
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    width = 1024
    square = flat[: flat.numel() // width * width].view(-1, width)
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(flat, dtype=dtype)
    rest = flat[square.numel() :].to(dtype)
    return torch.cat([square.sum(1, dtype=dtype), square.sum(0, dtype=dtype), rest, norm.unsqueeze(0)])
