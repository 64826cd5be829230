"""What each op costs: the numbers that planning works with, wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from pipepart.errors import PlanError

__all__ = ["SPLIT_LAYERS", "OpCosts"]

SPLIT_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The layers whose backward the runtime can run in two halves: the gradient of the input, and later that of the weights."""


@dataclass(frozen=True)
class OpCosts:
    """Times in seconds for one micro-batch and sizes in bytes, one entry per op of an `OpGraph`, in its order."""

    names: tuple[str, ...]
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    source: str
    """Where the numbers come from: ``profile``, ``analytic``, or the name of a file."""
    split_extra: tuple[float, ...] = ()
    """Seconds that an op takes longer where its backward runs in two halves; empty: none."""
    savers: tuple[tuple[int, ...], ...] = ()
    """The ops that keep the output of an op for their backward, by number, in order; empty: not known.

    What several ops keep counts once in `saved_bytes`, with the first of them."""
    notes: tuple[str, ...] = ()
    """The ops that could not be measured, and why; their costs are computed."""

    def __post_init__(self) -> None:
        if self.split_extra and len(self.split_extra) != len(self.names):
            raise PlanError(f"costs: expected {len(self.names)} entries in 'split_extra', got {len(self.split_extra)}")
        if self.savers and len(self.savers) != len(self.names):
            raise PlanError(f"costs: expected {len(self.names)} entries in 'savers', got {len(self.savers)}")
        for field in ("forward", "backward_input", "backward_weight", "parameter_bytes", "saved_bytes", "output_bytes"):
            values: Sequence[float] = getattr(self, field)
            if len(values) != len(self.names):
                raise PlanError(f"costs: expected {len(self.names)} entries in {field!r}, got {len(values)}")
            if any(not value >= 0 for value in values):
                worst = next(i for i, value in enumerate(values) if not value >= 0)
                raise PlanError(
                    f"costs: {field} of op {self.names[worst]!r} is {values[worst]}; expected a number >= 0"
                )

    @property
    def backward(self) -> tuple[float, ...]:
        """Time of the whole backward of each op: the input part and the weight part."""
        return tuple(i + w for i, w in zip(self.backward_input, self.backward_weight))

    def faster(self, factor: float) -> OpCosts:
        """The costs on a device that is so many times faster."""
        return replace(
            self,
            forward=tuple(t / factor for t in self.forward),
            backward_input=tuple(t / factor for t in self.backward_input),
            backward_weight=tuple(t / factor for t in self.backward_weight),
            split_extra=tuple(t / factor for t in self.split_extra),
        )

    def __len__(self) -> int:
        return len(self.names)
