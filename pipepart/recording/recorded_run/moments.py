"""Moments of a step that acts while it runs: it runs backwards and steps of optimizers between its ops.

A recorded run does not act. It counts the acts, and each op notes how many of them came before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["advance", "counted", "counting", "freeze", "is_frozen", "now", "refused"]

_now: int | None = None
_frozen: frozenset[int] = frozenset()
"""The parameters that the step has frozen for the time being, by id."""


@contextmanager
def counted() -> Iterator[None]:
    """Count the acts of the run inside, from 0."""
    global _now
    before, _now = _now, 0
    freeze(())
    try:
        yield
    finally:
        _now = before
        freeze(())


def counting() -> bool:
    """Return whether the step that runs counts its acts."""
    return _now is not None


def advance() -> None:
    """Count one act."""
    global _now
    assert _now is not None
    _now += 1


def now() -> int:
    """Return the number of acts so far."""
    return _now or 0


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Freeze these parameters and no others: the step sees it in `requires_grad`, and nothing is changed."""
    global _frozen
    _frozen = frozenset(map(id, parameters))


def is_frozen(func: Any, tensor: Any) -> bool:
    """Return whether a property that the step reads is `requires_grad` of a parameter that it has frozen."""
    return bool(_frozen) and id(tensor) in _frozen and getattr(func.__self__, "__name__", "") == "requires_grad"


def refused(func: Any, name: str, tensor: Any, at_root: bool) -> str:
    """Return why a call has no meaning in a run that does not act, and what to do; empty for all other calls.

    `tensor` is the first argument of the call, `at_root` tells whether the step itself calls it and not a submodule.
    """
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name in ("__get__", "__set__", "__delete__") and attribute == "grad":
        return (
            "the step reads or sets .grad, and no gradients exist while it is recorded. Clip with "
            "self.clip_gradients(optimizer, ...); read gradients of parameters in a hook (on_before_optimizer_step), and "
            "compute those of inputs by torch.func.grad"
        )
    freezes = name == "requires_grad_" or (name == "__set__" and attribute == "requires_grad")
    if freezes and isinstance(tensor, nn.Parameter):
        return "the step sets requires_grad of a parameter. Use self.toggle_optimizer and self.untoggle_optimizer"
    if at_root and name == "backward":
        return "the step calls backward() of a tensor. Use self.manual_backward(loss)"
    if at_root and func is torch.autograd.grad:
        return (
            "the step calls torch.autograd.grad. Use torch.func.grad, which is recorded as one op, or put the call into a "
            "submodule with at most 40 % of the parameters, which is then kept whole"
        )
    return ""
