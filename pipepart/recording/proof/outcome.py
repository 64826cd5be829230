"""What one run of a model, a step or a recording gives: outputs, buffers, gradients; and where two runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn

from pipepart.recording.trace.tensors import storage_of

__all__ = [
    "Difference",
    "Outcome",
    "backward_roots",
    "compact",
    "differences",
    "distance",
    "gradients_of",
    "largest_of",
    "noise_of",
    "outcome_of",
    "tolerance_of",
]

_SAME = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_NOISE = 16
"""Gradients that cancel to nothing (of a bias before a batch norm) are right up to so many rounding errors."""
_LARGE = 1 << 20
"""Gradients of more elements than this are kept as sums over their rows and columns, which need no memory to speak of."""


@dataclass(frozen=True)
class Outcome:
    """Flat outputs, buffers and gradients of one run; of large gradients, sums."""

    values: list[Any]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gradients: Mapping[str, torch.Tensor | None] | None = None
    """By the name of the parameter or input; None: no backward was run."""
    failure: str = ""
    """Why backward failed."""


@dataclass(frozen=True)
class Difference:
    """One thing that is another in two runs: ``output 0``, ``buffer mean``, ``gradient of weight``."""

    kind: str
    name: str
    text: str
    size: float
    """The largest difference over the largest element that was expected; infinite if they cannot be compared."""
    worst: float = float("inf")
    """The largest difference."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.text}"


def outcome_of(
    values: Sequence[Any],
    loss: int | None,
    root: nn.Module,
    inputs: Mapping[str, Any],
    backward: bool,
    retain: bool = False,
) -> Outcome:
    """Run backward from the outputs of a run that is just over, and keep what came of it. Nothing is left in ``.grad``.

    `inputs` are the leaves that went in, by name; those that require a gradient are compared too. With `retain`, autograd's
    graph stays.
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
    kept = [_kept(value, memory) for value in values]
    return Outcome(kept, buffers, gradients, failure)


def _kept(value: Any, memory: set[Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if storage_of(value) in memory else value.detach()


def backward_roots(values: Sequence[Any], loss: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs that backward starts from, and its gradients there: of a loss 1, else fixed pseudo-random numbers."""
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
    """Gradients of tensors by name; the hooks of these tensors do not run, and ``.grad`` stays as it is."""
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
    """Whether backward comes to a region of reentrant checkpointing, which gives gradients by way of ``.grad`` only."""
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
    """Gradients by way of ``.grad``: reentrant checkpointing inside a module that is one op knows no other."""
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
def _without_hooks(tensors: Any) -> Iterator[None]:
    """Hooks of the parameters themselves see whole gradients, in a recording as in the model: they stay out of it."""
    found = (hooks for tensor in tensors for hooks in (tensor._backward_hooks, _after_accumulation(tensor)) if hooks)
    saved = [(hooks, dict(hooks)) for hooks in found]
    for hooks, _ in saved:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in saved:
            hooks.update(items)


def _after_accumulation(tensor: torch.Tensor) -> Any:
    return getattr(tensor, "_post_accumulate_grad_hooks", None)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to compare by: itself, or if it is large its norm and its sums over rows and columns of a square."""
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


def tolerance_of(dtype: torch.dtype) -> float:
    """How far results may be apart, relative to their size, if they come of the same ops; of half precision one bit."""
    return _SAME[dtype] if dtype in _SAME else float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def noise_of(dtype: torch.dtype) -> float:
    """How large the rounding errors of a sum that cancels may be, relative to the largest of all gradients."""
    return _NOISE * float(torch.finfo(dtype).eps) if dtype in _SAME else 0.0


def distance(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two tensors of one shape, and the largest finite element of the second."""
    if not wanted.numel() or torch.equal(got, wanted):
        return 0.0, 1.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return float("inf"), 1.0
    a, b = (_real(got), _real(wanted))
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().masked_fill(same, 0.0)
    worst = float(torch.nan_to_num(apart, nan=float("inf"), posinf=float("inf")).max())
    sizes = b.abs()
    scale = float(sizes.masked_fill(~sizes.isfinite(), 0.0).max())
    return worst, scale


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in _SAME else tensor.float()


def differences(got: Outcome, wanted: Outcome, fake: bool = False) -> list[Difference]:
    """Where the outcome of one run differs from another's; with `fake`, shapes and dtypes are all that is compared."""
    found: list[Difference] = []
    for i, (value, other) in enumerate(zip(got.values, wanted.values)):
        if isinstance(other, torch.Tensor):
            found += _compared("output", str(i), value, other, fake)
    if fake:
        return found
    for name, buffer in wanted.buffers.items():
        found += _compared("buffer", name, got.buffers.get(name), buffer)
    if wanted.gradients is None or got.gradients is None:
        return found
    largest = cache(partial(largest_of, wanted.gradients.values()))
    for name, gradient in wanted.gradients.items():
        found += _compared_gradients(name, got.gradients.get(name), gradient, largest)
    return found


def largest_of(gradients: Iterable[torch.Tensor | None]) -> float:
    """The largest finite element of all gradients: what rounding errors that should cancel are compared with."""
    sizes = [float(g.abs().max()) for g in gradients if g is not None and g.numel()]
    return max((size for size in sizes if size < float("inf")), default=0.0)


def _compared_gradients(
    name: str, got: torch.Tensor | None, wanted: torch.Tensor | None, largest: Callable[[], float]
) -> list[Difference]:
    """None and zeros are not the same: an optimizer leaves a parameter without gradient alone, and decays the other."""
    if got is None and wanted is None:
        return []
    if got is None or wanted is None:
        text = "is missing" if got is None else "is there, and the model gives none"
        return [Difference("gradient of", name, text, float("inf"))]
    return _compared("gradient of", name, got, wanted, largest=largest)


def _compared(
    kind: str,
    name: str,
    value: Any,
    wanted: torch.Tensor,
    fake: bool = False,
    largest: Callable[[], float] | None = None,
) -> list[Difference]:
    inf = float("inf")
    if not isinstance(value, torch.Tensor):
        return [Difference(kind, name, f"is {type(value).__name__}, expected a tensor", inf)]
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        text = f"is {value.dtype} {tuple(value.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
        return [Difference(kind, name, text, inf)]
    if fake:
        return []
    worst, scale = distance(value, wanted)
    if worst <= tolerance_of(wanted.dtype) * scale:
        return []
    if largest is not None and worst <= noise_of(wanted.dtype) * largest():
        return []
    if worst == inf:
        return [Difference(kind, name, "has other values", inf)]
    text = f"differs by up to {worst:.3g} (its largest element is {scale:.3g})"
    return [Difference(kind, name, text, worst / scale if scale else inf, worst)]
