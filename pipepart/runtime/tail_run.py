"""Running the tail of a step: once per batch, on what the last chunk gave for all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipepart.errors import PlanError
from pipepart.planning import Plan
from pipepart.samples.laws import merged
from pipepart.samples.tail import Tail
from pipepart.schedule import Schedule

__all__ = ["TailStep", "check_schedule", "waits"]


class TailStep:
    """The tail in one step. The executor gives it the outputs of the body when it has all of them."""

    def __init__(
        self,
        tail: Tail,
        sizes: Sequence[int],
        loss_scale: float,
        context: Callable[[], AbstractContextManager[Any]],
        train: bool,
    ) -> None:
        self._tail, self._sizes, self._scale, self._context = tail, sizes, loss_scale, context
        self._train = train and tail.loss is not None
        self.outputs: list[Any] = []
        """Those that the tail makes, in the order of its cut."""
        self.gradients: list[dict[int, torch.Tensor]] = []
        """For each micro-batch the gradients of the outputs of its body, by their index."""

    def run(self, bodies: Sequence[tuple[Any, ...]]) -> None:
        """Put the micro-batches together, and run forward and, if the loss is made here, backward."""
        first = len(self._tail.kept)
        leaves: list[dict[int, torch.Tensor]] = []
        for body in bodies:
            roots = self._tail.roots if self._train else ()
            leaves.append({index: body[index].detach().requires_grad_() for index in roots})
        with torch.set_grad_enabled(self._train), self._context():
            arguments = []
            for index, law in enumerate(self._tail.cut.inputs.values(), first):
                parts = [own.get(index, body[index]) for own, body in zip(leaves, bodies)]
                value = merged(law, parts, self._sizes)
                copied = self._tail.inplace and isinstance(value, torch.Tensor)
                arguments.append(value.clone() if copied else value)
            results = self._tail.module(*arguments)
        if self._train:
            loss = results[self._tail.loss]
            torch.autograd.backward(loss, torch.full_like(loss, self._scale))
        self.outputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in results]
        self.gradients = [{index: leaf.grad for index, leaf in own.items() if leaf.grad is not None} for own in leaves]


def waits(schedule: Schedule, chunk: int, stage: int) -> bool:
    """Whether a stage runs all forwards of a chunk before its first backward."""
    kinds = [action.kind for action in schedule.actions[stage] if action.chunk == chunk]
    return "F" not in kinds[next((i for i, kind in enumerate(kinds) if kind in "BIW"), len(kinds)) :]


def check_schedule(plan: Plan, why: str) -> None:
    """Refuse a schedule that begins with backwards before the loss of the whole batch can be known."""
    if not waits(plan.make_schedule(), len(plan.placement) - 1, plan.placement[-1]):
        raise PlanError(
            f"{why}, so the loss is known when all forwards have run, and the schedule {plan.schedule!r} begins with "
            "backwards before that. Use schedule='gpipe' (what 'auto' takes here), or microbatches=1."
        )
