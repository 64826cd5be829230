"""The walk from an output of a recording back through linear ops to its terms: sums and means over samples.

The walk knows linear ops, reductions and the loss functions of torch. Any other op makes the value `Unknown`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.op import dtype_of, op_of
from pipepart.recording.recorded_run import intrinsics
from pipepart.samples.follow import Unknown, argument, dims_of, name_of, operands
from pipepart.samples.forms import Form, Keep, Op, Ratio, Scaled, Share, Sum, Whole
from pipepart.samples.losses import loss_form
from pipepart.samples.quantities import Quantities

__all__ = ["Terms"]

_SAME_VALUE = frozenset((
    "clone", "detach", "contiguous", "float", "double", "half", "bfloat16", "to", "type_as", "type", "squeeze",
    "unsqueeze", "view", "reshape", "flatten", "alias", "as_tensor",
))  # fmt: skip
"""Ops of one operand that keep its values, in another type or shape."""

_LISTS = ("stack", "cat", "hstack", "vstack")


class Terms:
    """Finds the forms of the outputs of one recording."""

    def __init__(self, quantities: Quantities) -> None:
        self._follow, self._quantities = quantities.follow, quantities
        self._known: dict[fx.Node, Form] = {}

    def form(self, node: Any) -> Form:
        """Return the form of a value. Raises `Unknown`."""
        if not isinstance(node, fx.Node) or not self._follow.depends(node):
            return Keep(node)
        if node not in self._known:
            self._known[node] = _safe(self._form(node))
        return self._known[node]

    def _form(self, node: fx.Node) -> Form:
        if node.op == "placeholder" or op_of(node).random:
            raise Unknown(node, "it is a part of the batch, or drawn at random")
        if op_of(node).is_number:
            return Whole(node, self._quantities.of(node))
        if self._follow.ragged(node) or self._follow.dims(node):
            raise Unknown(node, "it still has a dimension of samples")
        name = name_of(node)
        if name in ("sum", "nansum", "mean", "count_nonzero"):
            return self._reduction(node, name)
        loss = loss_form(node, self._quantities)
        if loss is not None:
            return loss
        meta = op_of(node)
        if self._follow.pure(node) and meta.shape == () and dtype_of(node).is_floating_point:
            return Whole(node, self._quantities.of(node))
        return self._linear(node, name)

    # ---- sums and means

    def _reduction(self, node: fx.Node, name: str) -> Form:
        source = argument(node, 0, "input")
        assert isinstance(source, fx.Node)
        shape = op_of(source).shape
        if shape is None:
            raise Unknown(node, "its sizes are not known")
        dims = dims_of(node, len(shape))
        if not self._follow.ragged(source):
            following = self._follow.dims(source)
            if not following and name in ("sum", "mean"):
                return self._op(node, source)  # an earlier op has reduced over the samples
            if len(following) != 1 or dims is None or following[0] not in dims:
                raise Unknown(node, "it does not reduce over the samples exactly once")
            return Share(node) if name == "mean" else Sum(node)
        if dims is None or 0 not in dims:
            raise Unknown(node, "it does not reduce over the selected rows")
        if name != "mean":
            return Sum(node)
        rows = self._quantities.count_rows(source)
        if len(dims) > 1 and dims != tuple(range(len(shape))):
            raise Unknown(node, "it is a mean over some dimensions of a selection only")

        def numerator(graph: fx.Graph) -> fx.Node:
            kwargs = {key: value for key, value in node.kwargs.items() if key not in ("dim", "keepdim", "axis")}
            return graph.call_method("sum", (source, list(dims), bool(argument(node, 2, "keepdim", False))), kwargs)

        return Ratio(node, rows, numerator, source if len(dims) > 1 else None)

    # ---- linear ops

    def _linear(self, node: fx.Node, name: str) -> Form:
        if node.target is intrinsics.changed:
            return self._changed(node)
        if name in ("add", "sub", "rsub"):
            first, second = operands(node)
            if argument(node, 2, "alpha", 1) != 1 and not isinstance(second, fx.Node):
                raise Unknown(node, "alpha is applied to a plain number")
            return self._op(node, first, second)
        if name == "mul":
            first, second = operands(node)
            if isinstance(first, fx.Node) and (not isinstance(second, fx.Node) or self._is_factor(second)):
                return self._times(node, first, second, 1)
            return self._times(node, second, first, 1)
        if name in ("div", "rdiv"):
            if node.kwargs.get("rounding_mode") is not None:
                raise Unknown(node, "the division rounds")
            return self._times(node, *operands(node), -1)
        if name == "neg":
            return self._op(node, node.args[0])
        if name in _SAME_VALUE:
            if not dtype_of(node).is_floating_point:
                raise Unknown(node, "it becomes a whole number")
            return self._op(node, node.args[0])
        if name in _LISTS:
            parts = argument(node, 0, "tensors")
            if isinstance(parts, (tuple, list)) and not any(self._follow.dims(part) for part in parts):
                return self._op(node, *parts)
        if name == "getitem" and not _has_node(node.args[1]):
            source = node.args[0]
            if not isinstance(source, fx.Node) or op_of(source).shape is None:
                raise Unknown(node, "it is an item of a tuple")
            return self._op(node, source)
        raise Unknown(node, f"{name or node.target} is not known to be linear")

    def _op(self, node: fx.Node, *sources: Any) -> Form:
        return Op(node, {source: self.form(source) for source in sources})

    def _is_factor(self, value: fx.Node) -> bool:
        """Return whether a value is not a term: it does not depend on the batch, or it is one number of the batch."""
        if not self._follow.depends(value):
            return True
        meta = op_of(value)
        return self._follow.pure(value) and (meta.is_number or meta.shape == ())

    def _times(self, node: fx.Node, term: Any, factor: Any, power: int) -> Form:
        inner = self.form(term)
        if not isinstance(factor, fx.Node) or not self._follow.depends(factor):
            return Op(node, {term: inner})
        if not self._is_factor(factor):
            raise Unknown(node, "both operands depend on the parameters and on the batch")
        if not isinstance(term, fx.Node):
            raise Unknown(node, "a plain number is divided by a number of the batch")
        return Scaled(node, inner, self._quantities.of(factor), power)

    def _changed(self, node: fx.Node) -> Form:
        """Return the form of a tensor after an op in place: that of the op, if it changed this very tensor as a whole."""
        tensor, mutation = node.args
        if isinstance(mutation, fx.Node) and isinstance(tensor, fx.Node) and mutation.op == "call_method":
            same = mutation.args and mutation.args[0] is tensor and name_of(mutation) in ("add", "sub", "mul", "div")
            if same and op_of(mutation).shape == op_of(node).shape:
                return self.form(mutation)
        raise Unknown(node, "it was changed in place")


def _safe(form: Form) -> Form:
    """Refuse a mean that would be computed as a sum in float16, whose largest number is 65504."""
    if isinstance(form, Ratio) and op_of(form.node).dtype == torch.float16:
        raise Unknown(form.node, "its sum may be too large for float16")
    return form


def _has_node(index: Any) -> bool:
    return any(isinstance(item, fx.Node) for item in (index if isinstance(index, (tuple, list)) else [index]))
