"""Hooks that the user registered on parameters (`parameter.register_hook`): they see whole gradients.

A backward of each micro-batch would call them with the share of this micro-batch. So they are taken off while the
micro-batches run, and called once with the gradient of the whole batch, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from pipepart.errors import CaptureError

__all__ = ["hooks_once"]


@contextmanager
def hooks_once(parameters: Mapping[str, nn.Parameter], reduces: bool) -> Iterator[None]:
    """Call the hooks of parameters when the region ends, with their `.grad`. `reduces`: it is that of all replicas then."""
    hooked = {name: parameter for name, parameter in parameters.items() if parameter._backward_hooks}
    if not hooked:
        yield
        return
    if not reduces:
        raise CaptureError(
            f"{next(iter(hooked))} has a hook (register_hook). With several replicas, batches that are accumulated are "
            "combined once, so no replica has the gradient of one batch. Do it in on_before_optimizer_step instead, which sees "
            "the gradients of all of them, or use one replica."
        )
    saved = {name: dict(parameter._backward_hooks or {}) for name, parameter in hooked.items()}
    for parameter in hooked.values():
        _hooks_of(parameter).clear()
    try:
        yield
    finally:
        for name, parameter in hooked.items():
            _hooks_of(parameter).update(saved[name])
    for name, parameter in hooked.items():
        for hook in saved[name].values():
            if parameter.grad is not None:
                with torch.no_grad():
                    changed = hook(parameter.grad)
                parameter.grad = parameter.grad if changed is None else changed


def _hooks_of(parameter: nn.Parameter) -> dict[int, object]:
    hooks: dict[int, object] = parameter._backward_hooks  # type: ignore[assignment]
    return hooks
