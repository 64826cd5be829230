"""Description of an op: one frozen record for each node of a recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

__all__ = ["OpData", "OpMeta", "dtype_of", "has_op", "op_of", "set_op", "shape_of", "where_is"]


@dataclass(frozen=True, kw_only=True)
class OpData:
    """Plain data of an op: its origin in the model and its result. It holds no tensors and no nodes."""

    module: str = ""
    """Path of the module whose code calls the op."""
    module_class: str = ""
    source: str = ""
    """File and line of the call."""
    shape: tuple[int, ...] | None = None
    """Shape of the result for the example; None if the result is not a tensor."""
    dtype: torch.dtype | None = None
    output_bytes: int = 0
    requires_grad: bool = False
    random: bool = False
    """Whether the op draws random numbers."""
    dynamic_shape: bool = False
    """Whether the shape of the result depends on the contents of a tensor."""
    replicable: bool = False
    """Whether every chunk may compute the op for itself: it is cheap, deterministic and has no gradient."""
    flops: int = 0
    """Floating-point operations of the forward for the example."""


@dataclass(frozen=True, kw_only=True)
class OpMeta(OpData):
    """Description of one node of a recording: its plain data, and the state that running it depends on."""

    is_number: bool = False
    """Whether the value is a Python number."""
    stateful: bool = False
    """Whether a call that is kept whole changes state of its module."""
    computes: bool = True
    """Whether gradient mode, autocast and switches affect the op; they do not affect numbers and checks."""
    grad_mode: bool = True
    autocast: tuple[Any, ...] = ()
    """Autocast settings, if they differ from those around the recording."""
    switches: tuple[Any, ...] = ()
    """Settings of the process, if they differ from those around the recording."""
    checkpoint: tuple[int, ...] = ()
    """Regions of activation checkpointing that hold the op, the outermost first, as positions in the recording."""
    moment: int = 0
    """The number of acts of the step before the op: backwards, steps of optimizers and the like."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Sizes of each dimension in all recorded runs; for a node that is a size, its values in all runs."""
    reads: frozenset[Any] = frozenset()
    """Memory of the arguments, by keys that tensors in the same memory share."""
    writes: frozenset[Any] = frozenset()
    """Memory of the results."""
    mutates: frozenset[Any] = frozenset()
    """Memory that the op changes in place."""
    differentiates: frozenset[fx.Node] = frozenset()
    """Arguments that receive a gradient through the op."""

    @property
    def inplace(self) -> bool:
        """Whether the op changes memory in place."""
        return bool(self.mutates)

    def beside(self, **fields: Any) -> OpMeta:
        """Return the description of an op that is added at the same place of the model, with these other fields."""
        return OpMeta(module=self.module, module_class=self.module_class, source=self.source, **fields)


_KEY = "op"


def op_of(node: fx.Node) -> OpMeta:
    """Return the description of a node of a recording, or of a copy of such a node."""
    op: OpMeta = node.meta[_KEY]
    return op


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node whose value is a tensor."""
    shape = op_of(node).shape
    assert shape is not None, node
    return shape


def dtype_of(node: fx.Node) -> torch.dtype:
    """Return the dtype of a node whose value is a tensor."""
    dtype = op_of(node).dtype
    assert dtype is not None, node
    return dtype


def has_op(node: fx.Node) -> bool:
    """Return whether a node is described. Nodes that only an executable graph has are not."""
    return _KEY in node.meta


def set_op(node: fx.Node, op: OpMeta) -> None:
    """Set the description of a node, and replace the one that it has."""
    node.meta[_KEY] = op


def where_is(node: fx.Node) -> str:
    """Return the module and the line of an op in words."""
    if node.op == "get_attr" or not has_op(node):
        return "input"
    return f"module {op_of(node).module!r} at {op_of(node).source}"
