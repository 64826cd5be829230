"""Hooks of parameters (`parameter.register_hook`): they see the gradient of a whole batch, not those of its micro-batches.

A hook may clip what it gets, or divide it by its norm: once for each micro-batch, that would be something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipepart.errors import PipelineError
from pipepart.runtime.sync import BucketedSync

__all__ = ["Hooks", "check_hooks", "hooked", "hooks_aside", "not_of_one_batch"]

Hooks = Mapping[str, Mapping[int, Any]]
"""The hooks of parameters, by the name of the parameter and the number of the hook."""


def check_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse hooks that look at `.grad` after each backward: it has the gradient of one micro-batch, or of one replica."""
    for name, parameter in parameters.items():
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            if not isinstance(getattr(hook, "__self__", None), BucketedSync):
                raise PipelineError(
                    f"parameter {name!r} has a hook of register_post_accumulate_grad_hook, for example an optimizer that makes "
                    "its update inside of backward. It would be called for each micro-batch, with a part of the gradient.\n"
                    "  do: update after the step, or use microbatches=1 and one replica; register_hook gets whole gradients"
                )


def not_of_one_batch(name: str) -> PipelineError:
    """Return the error for a hook whose parameter has no gradient of one batch."""
    return PipelineError(
        f"parameter {name!r} has a hook (register_hook), and the gradients of accumulated batches are combined once, so no "
        "rank has the gradient of one batch.\n"
        "  do: change the gradients of all batches before the step of the optimizer (on_before_optimizer_step), or do not "
        "accumulate batches; a Trainer with one replica may"
    )


@contextmanager
def hooks_aside(parameters: Mapping[str, nn.Parameter]) -> Iterator[Hooks]:
    """Remove the hooks of parameters inside, and return them."""
    places: dict[str, Any] = {name: p._backward_hooks for name, p in parameters.items() if p._backward_hooks}
    found = {name: dict(hooks) for name, hooks in places.items()}
    for hooks in places.values():
        hooks.clear()
    try:
        yield found
    finally:
        for name, hooks in places.items():
            hooks.update({**found[name], **hooks})


@torch.no_grad()
def hooked(gradients: Mapping[str, torch.Tensor], hooks: Hooks) -> dict[str, torch.Tensor]:
    """Return gradients by name after the hooks of their parameters, as autograd calls them."""
    made = dict(gradients)
    for name, own in hooks.items():
        for hook in own.values() if name in made else ():
            changed = hook(made[name])
            made[name] = made[name] if changed is None else changed
    return made
