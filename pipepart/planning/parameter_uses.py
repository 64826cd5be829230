"""Which ops use which parameters, and the bytes of parameters that the parts of a split hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pipepart.graph import OpGraph

__all__ = ["HeldParameters", "ParameterSizes", "ParameterUses", "SharedParameters", "parameter_sizes"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ParameterSizes = Mapping[str, tuple[int, int]]
"""Parameter name -> (elements, bytes)."""


def parameter_sizes(root: nn.Module) -> ParameterSizes:
    """The sizes of all parameters of a model."""
    return {name: (p.numel(), p.numel() * p.element_size()) for name, p in root.named_parameters()}


@dataclass(frozen=True, eq=False)
class HeldParameters:
    """Bytes of the parameters of each part, and of those that are trained."""

    all: Floats
    trained: Floats


@dataclass(frozen=True)
class SharedParameters:
    """Trained parameters that the same chunks use."""

    chunks: tuple[int, ...]
    size: float
    """Bytes."""


@dataclass(frozen=True, eq=False)
class _Table:
    op: Ints
    parameter: Ints
    """Of every use, with its op."""
    size: Floats
    """Bytes of every parameter,"""
    trained: Floats
    """and of those that are trained (0 for the others)."""


@dataclass(frozen=True, eq=False)
class ParameterUses:
    """The parameters of one graph."""

    graph: OpGraph
    sizes: ParameterSizes
    frozen: Collection[str] = ()
    """Parameters without gradient and optimizer state."""

    def held(self, part_of: Ints, count: int) -> HeldParameters:
        """The parameters of each part (chunk or stage): a parameter counts once in each."""
        uses = self._uses
        if not len(uses.op):
            return HeldParameters(np.zeros(count), np.zeros(count))
        keys = np.unique(part_of[uses.op] * len(uses.size) + uses.parameter)
        part, which = keys // len(uses.size), keys % len(uses.size)

        def total(values: Floats) -> Floats:
            return np.bincount(part, weights=values[which], minlength=count).astype(np.float64)

        return HeldParameters(total(uses.size), total(uses.trained))

    def shared(self, chunk: Ints) -> tuple[SharedParameters, ...]:
        """Trained parameters that several ops use, those of the same chunks together."""
        uses = self._uses
        found: dict[tuple[int, ...], float] = {}
        for which in self._used_often:
            if uses.trained[which]:
                chunks = tuple(sorted(set(chunk[uses.op[uses.parameter == which]].tolist())))
                found[chunks] = found.get(chunks, 0.0) + float(uses.trained[which])
        return tuple(SharedParameters(chunks, size) for chunks, size in sorted(found.items()))

    @cached_property
    def _uses(self) -> _Table:
        number = {name: i for i, name in enumerate(self.sizes)}
        uses = [(i, number[name]) for i, op in enumerate(self.graph.ops) for name in op.parameters]
        table = np.array(uses, dtype=np.int64).reshape(-1, 2)
        size = np.array([float(self.sizes[name][1]) for name in number])
        trained = np.array([0.0 if name in self.frozen else float(self.sizes[name][1]) for name in number])
        return _Table(table[:, 0], table[:, 1], size, trained)

    @cached_property
    def _used_often(self) -> list[int]:
        """Parameters that several ops use."""
        uses = self._uses
        return [int(which) for which in np.flatnonzero(np.bincount(uses.parameter, minlength=len(uses.size)) > 1)]
