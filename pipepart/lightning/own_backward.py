"""The `backward` that a module overrides, in its class or as an attribute of the object.

It gets a loss whose own backward hands over the gradients of the step.

The backward of a pipeline has run inside its schedule by then. The derivative of what the user's code calls `backward` on, by
the loss of the step, is a factor of these gradients: so code that scales the loss, calls `backward` twice or not at all has the
effect that it has on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pipepart.errors import ConfigError
from pipepart.lightning.namespaces import of, overridden
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["hand_over_by_backward"]


def hand_over_by_backward(trainer: Trainer, module: LightningModule, loss: torch.Tensor, runtime: StageRuntime) -> None:
    """Add the gradients of the step to `.grad`, by the user's `backward` if there is one. Every rank must call it."""
    if not overridden("backward", module, "LightningModule") and "backward" not in vars(module):
        runtime.hand_over(show_own=True)
        return
    name = type(module).__name__
    waiting = _Waiting(name, runtime, reduced=not trainer.fit_loop._should_accumulate())
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    calls: Any = of(trainer).module("pytorch.trainer.call")
    with guarded(runtime.groups), torch.enable_grad(), _only_by_backward(name):
        made: torch.Tensor = _Loss.apply(anchor, loss.detach(), waiting)  # type: ignore[no-untyped-call]
        calls._call_lightning_module_hook(trainer, "backward", made)
        waiting.end()


class _Waiting:
    """The gradients of one step on this rank, until the loss of that step is differentiated."""

    def __init__(self, name: str, runtime: StageRuntime, reduced: bool) -> None:
        self._name, self._runtime = name, runtime
        self._replicas = runtime.groups.mesh.replicas if runtime.groups is not None else 1
        # Gradients of several batches that are not reduced yet stay where they are: they can only be handed over as they are.
        self._gradients = runtime.parameters.take_gradients() if self._replicas == 1 or reduced else None
        self._factor = 0.0

    @torch.no_grad()
    def hand_over(self, factor: float) -> None:
        """Add the gradients, times `factor`, to `.grad`."""
        self._factor += factor
        if self._gradients is None:
            self._runtime.hand_over(show_own=True)
            return
        parameters = self._runtime.named_parameters()
        for name, gradient in self._gradients.items():
            parameter, new = parameters[name], gradient * factor
            parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)

    def end(self) -> None:
        """Refuse factors that replicas may not share: their gradients are combined already."""
        if self._replicas > 1 and self._factor != 1.0:
            raise ConfigError(
                f"{self._name}.backward differentiates {self._factor:g} times the loss of the step. The gradients of replicas "
                "are combined in the step: multiply the loss in training_step, and call loss.backward() once in backward()."
            )


class _Loss(torch.autograd.Function):
    """The loss of a step whose backward has run already. Its backward hands over the gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, waiting: _Waiting) -> torch.Tensor:  # type: ignore[override]
        ctx.waiting = waiting
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.waiting.hand_over(float(gradient))
        return None, None, None


@contextmanager
def _only_by_backward(name: str) -> Iterator[None]:
    """Inside, `torch.autograd.grad` is refused: the loss is connected with no parameter."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{name}.backward calls torch.autograd.grad. The backward of a pipeline runs inside its schedule, so the loss is "
            "connected with no parameter there: call loss.backward(), and change gradients in on_after_backward."
        )

    original, torch.autograd.grad = torch.autograd.grad, refuse
    try:
        yield
    finally:
        torch.autograd.grad = original
