"""The values of a pipeline in a plain loop: parameters and gradients of this stage, states of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pipepart.runtime.stage import StageRuntime

__all__ = ["StageValues"]


class StageValues:
    """The part of a pipeline that gives access to its values."""

    _runtime: StageRuntime
    _nothing: nn.Parameter
    """A parameter without elements, for a stage without parameters."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this stage, for the optimizer of this rank.

        A stage of a small model may have none. Optimizers refuse an empty list, so there is one parameter without elements
        then, which has a gradient after a step like the others.
        """
        return iter(list(self._runtime.named_parameters().values()) or [self._nothing])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of this stage with their full names; a stage may have none."""
        return iter(self._runtime.named_parameters().items())

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients by their norm over the whole model, and return that norm."""
        return self._runtime.clip_grad_norm(list(self.parameters()), max_norm)

    def average_replicas(self) -> None:
        """Give all replicas the mean of their parameters, if they make updates of their own (``local``, ``ring``).

        Call it at the end of training, on all ranks together. A round begins anew.
        """
        self._runtime.parameters.average()

    @property
    def staleness(self) -> Mapping[int, int]:
        """For each number of updates between two visits of the token, how often this rank has seen it (``ring``)."""
        loose = self._runtime.parameters.loose
        return {} if loose is None else loose.staleness

    def sync_state_dict(self) -> dict[str, Any]:
        """Return the place in the round, and the states of an outer optimizer, of the parameters of this stage (``local``)."""
        loose = self._runtime.parameters.loose
        return {} if loose is None else loose.state_dict()

    def load_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the round of a state. The parameters and the optimizer of each replica are loaded by themselves."""
        loose = self._runtime.parameters.loose
        if loose is not None and state:
            loose.load_state_dict(state)

    def whole_parameters(self, gradients: bool = False) -> AbstractContextManager[None]:
        """Hold all parameters (and gradients) and buffers of `module` on every rank inside. All ranks must enter together.

        Each stage keeps the values that are written to its parameters inside, so every rank must write the same values.
        """
        return self._runtime.gathered(gradients)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model on rank 0, and an empty dict elsewhere. Every rank must call it."""
        return self._runtime.full_state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load the part of this stage from a state dict of the whole model."""
        self._runtime.load_full_state_dict(state, strict)
