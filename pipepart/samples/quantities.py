"""Quantities: numbers that come from the batch alone, such as counts of targets, sums of masks and rows of selections.

A term of a loss is divided by a quantity. Samples are also computed with quantities (`weights / weights.sum()`,
`x / x.abs().max()`, `l / len(l)`): in a micro-batch, such a number differs from that of the whole batch. Numbers that come
from the network are not quantities, because the graph does not tell whether the network combines samples.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import op_of, set_op, shape_of
from pipepart.recording.recorded_run import intrinsics
from pipepart.samples.follow import Following, Unknown, argument, before, name_of, sources_of

__all__ = ["SAMPLES", "DataCheck", "Quantities", "Quantity", "Swap", "count_targets", "text_of"]

SAMPLES = "samples"
"""The key of the number of samples, or of anything proportional to it."""

_MOST_ELEMENTS = 64
"""Elements of a tensor of the whole batch that are computed before the step, each as a number."""
_CASTS = ("to", "float", "double", "half", "bfloat16", "long", "int", "type_as", "clone", "detach", "contiguous")
_SHAPES = ("flatten", "view", "reshape", "contiguous")

_ROWWISE = frozenset((
    "abs", "absolute", "add", "addcmul", "addcdiv", "bfloat16", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "celu", "clamp", "clip", "clone", "contiguous", "cos", "cosh",
    "cosine_similarity", "cross_entropy", "detach", "div", "double", "dropout", "elu", "erf", "exp", "expm1",
    "float", "float_power", "gelu", "half", "hardtanh", "huber_loss", "kl_div", "l1_loss", "layer_norm",
    "leaky_relu", "linear", "log", "log10", "log1p", "log2", "log_softmax", "logsigmoid", "logsumexp", "maximum",
    "minimum", "mish", "mse_loss", "mul", "neg", "nll_loss", "normalize", "pow", "reciprocal", "relu", "relu6",
    "rms_norm", "rsub", "rdiv", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "smooth_l1_loss", "softmax",
    "softplus", "sqrt", "square", "sub", "tanh", "to", "type_as", "where", "xlogy",
))  # fmt: skip
"""Ops whose result has the rows of its operands, each computed from the same row of them."""

_ROWWISE_MODULES = (
    nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU,
    nn.LeakyReLU, nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.LogSigmoid, nn.PReLU, nn.Hardtanh, nn.Mish, nn.CELU,
)  # fmt: skip

_ARITHMETIC = frozenset((
    "add", "sub", "rsub", "mul", "div", "rdiv", "pow", "rpow", "clamp", "clip", "maximum", "minimum", "where",
    "masked_fill", "lerp", "addcmul", "addcdiv", "floor_divide", "remainder", "fmod", "eq", "ne", "lt", "le", "gt",
    "ge", "float_power",
))  # fmt: skip
"""Ops that compute with the numbers that they are given; in other ops, numbers are sizes and positions."""


# ---- ops that are added to count; their values add up over batches


def count_targets(target: torch.Tensor, ignore_index: int, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the denominator of `cross_entropy` and `nll_loss`: the weights of all targets that are not ignored."""
    used = target != ignore_index
    if weight is None:
        return used.sum()
    return weight[target.masked_select(used)].sum()


def true_elements(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of elements of a mask that are set."""
    return torch.count_nonzero(mask)


def size_of_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return the size of dimension 0 as a tensor."""
    return torch.tensor(tensor.shape[0])


def element_of(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return one element of a tensor."""
    return tensor.flatten()[index]


count_targets.adds_up = true_elements.adds_up = size_of_first.adds_up = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Quantity:
    """A number of the whole batch: the value of `node` for all its samples."""

    name: str
    key: str
    """Equal for quantities that are always equal, or (the number of samples) always proportional."""
    node: fx.Node


@dataclass(frozen=True)
class DataCheck:
    """A branch of the model on the contents of the batch: `node` must have the recorded value for the whole batch."""

    node: fx.Node
    expected: Any
    text: str


@dataclass(frozen=True)
class Swap:
    """An op that computes samples with the value of `source`: it gets the value of the whole batch instead."""

    user: fx.Node
    source: fx.Node
    elements: tuple[Quantity, ...]
    """The number, or all elements of a small tensor, in order."""


@dataclass
class Quantities:
    """All quantities of a recording, in the order in which they were found."""

    recording: Recording
    follow: Following
    found: dict[str, Quantity] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """For each op that was added, the op beside which it was written."""
    checks: list[DataCheck] = field(default_factory=list)

    def of(self, node: fx.Node) -> Quantity:
        """Return the value of a node for the whole batch. Sizes along the batch are the number of samples, times a constant."""
        if not self.follow.pure(node):
            raise Unknown(node, "it is needed for the whole batch, but it is not made from the batch alone")
        meta = op_of(node)
        if not meta.is_number and meta.shape != ():
            raise Unknown(node, "it is not a single number")
        key = SAMPLES if meta.is_number and self.follow.counts_samples(node) else text_of(node)
        return self.found.setdefault(node.name, Quantity(node.name, key, node))

    def count(self, near: fx.Node, function: Any, args: tuple[Any, ...]) -> Quantity:
        """Return the value of ``function(*args)`` for the whole batch, an op of our own that is written beside `near`."""
        # The count of all targets does not depend on the shape of their tensor.
        shaped = [before(arg, _SHAPES) for arg in args] if function is count_targets else args
        key = f"{getattr(function, '__name__', function)}({', '.join(text_of(arg) for arg in shaped)})"
        for arg in args:
            if isinstance(arg, fx.Node) and not self.follow.pure(arg):
                raise Unknown(arg, "the denominator of the loss depends on it, and it is not made from the batch alone")
        if key not in self.found:
            graph = self.recording.graph
            with graph.inserting_after(near) if near in args else graph.inserting_before(near):
                method = isinstance(function, str)
                node = graph.call_method(function, args) if method else graph.call_function(function, args)
            set_op(node, op_of(near).beside(shape=(), output_bytes=8, replicable=True))
            self.origins[node.name] = near.name
            self.found[key] = Quantity(key, key, node)
        return self.found[key]

    def count_rows(self, node: fx.Node) -> Quantity:
        """Return the size of dimension 0 of a tensor whose shape depends on the contents of the batch (`x[mask]`)."""
        follow = self.follow
        if follow.pure(node):
            return self.count(node, size_of_first, (node,))
        if not follow.ragged(node):
            raise Unknown(node, "it has another number of rows than the selection that it is combined with")
        name = name_of(node)
        if name in ("getitem", "masked_select", "index_select"):
            return self._count_selected(node, name)
        rowwise = name in _ROWWISE
        if node.op == "call_module":
            rowwise = type(resolve(self.recording.root, str(node.target))) in _ROWWISE_MODULES
        sources = [s for s in node.all_input_nodes if follow.depends(s) and (follow.ragged(s) or op_of(s).shape)]
        if not rowwise or not sources or not all(follow.ragged(s) for s in sources):
            raise Unknown(node, f"the number of its rows is not known from the batch ({name or node.target})")
        counts = [self.count_rows(source) for source in sources]
        return counts[0]

    def _count_selected(self, node: fx.Node, name: str) -> Quantity:
        source, index = argument(node, 0, "input"), argument(node, 1, "mask")
        if name == "index_select":
            index = argument(node, 2, "index") if argument(node, 1, "dim") == 0 else None
        if isinstance(index, (tuple, list)) and index and all(isinstance(i, fx.Node) for i in index):
            index = index[0]  # the first of several lists of positions, or of masks, has the number of rows
        if not isinstance(index, fx.Node) or not isinstance(source, fx.Node) or op_of(index).shape is None:
            raise Unknown(node, "its selection is not known from the batch")
        mask, shape = op_of(index), op_of(source).shape
        if mask.dtype == torch.bool:
            if name == "masked_select" and mask.shape != shape:
                raise Unknown(node, "the mask has another shape than the tensor from which it selects")
            if not self.follow.ragged(index) and 0 not in self.follow.dims(index):
                raise Unknown(node, "dimension 0 of the mask is not that of the samples")
            return self.count(node, true_elements, (index,))
        if mask.dtype in (torch.int64, torch.int32) and len(shape_of(index)) == 1:
            return self.count(node, size_of_first, (index,))
        raise Unknown(node, "its selection is not known from the batch")

    def swaps(self, term: fx.Node) -> list[Swap]:
        """Return the arguments that must be quantities of the whole batch for a term to be right."""
        found = []
        for user in sorted(sources_of([term]) & self._statistics.keys(), key=lambda node: node.name):
            for source in self._statistics[user]:
                with suppress(Unknown):
                    found.append(Swap(user, source, self._elements(source)))
        return found

    def _elements(self, node: fx.Node) -> tuple[Quantity, ...]:
        """Return the numbers of a value for the whole batch: of a number, or of a small tensor (a scale for each channel)."""
        shape = op_of(node).shape
        if op_of(node).is_number or not shape or not 1 <= prod(shape) <= _MOST_ELEMENTS or self.follow.ragged(node):
            return (self.of(node),)
        return tuple(self.count(node, element_of, (node, index)) for index in range(prod(shape)))

    @cached_property
    def _statistics(self) -> dict[fx.Node, list[fx.Node]]:
        """For each op that computes samples with numbers of their batch, its arguments that are such numbers."""
        found = {}
        for node in self.recording.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                numbers = [source for source in node.all_input_nodes if self._is_statistic(node, source)]
                found.update({node: numbers} if numbers else {})
        return found

    def _is_statistic(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether `node` has samples, and `source` depends on their batch and has none."""
        meta = op_of(node)
        if not self.follow.depends(source) or source.op == "placeholder" or meta.is_number or meta.shape is None:
            return False
        if node.target in (intrinsics.check, intrinsics.changed) or not self.follow.has_samples(node):
            return False
        if op_of(source).is_number:
            return name_of(node) in _ARITHMETIC
        return op_of(source).shape is not None and not self.follow.has_samples(source)

    def take_checks(self) -> None:
        """Move checks of branches on the contents of the batch alone out of the graph: they are made for the whole batch."""
        for node in list(self.recording.graph.nodes):
            value: Any = node.args[0] if node.target is intrinsics.check else None
            if isinstance(value, fx.Node) and self.follow.pure(value) and _reads_data(value):
                self.checks.append(DataCheck(value, node.args[1], str(node.args[2])))
                self.recording.graph.erase_node(node)


def text_of(value: Any) -> str:
    """Return the ops that compute a value as a text, without changes of type. Values with equal texts are equal."""
    if not isinstance(value, fx.Node):
        return repr(value)
    if value.op in ("placeholder", "get_attr"):
        return str(value.target)
    name = name_of(value)
    if name in _CASTS and isinstance(value.args[0], fx.Node):
        return text_of(value.args[0])
    inner = [text_of(arg) for arg in (*value.args, *value.kwargs.values()) if not isinstance(arg, torch.dtype)]
    return f"{name or value.name}({', '.join(inner)})"


def _reads_data(value: fx.Node) -> bool:
    """Return whether a value depends on the contents of tensors of the batch, not only on their sizes."""
    sources = sources_of([value], lambda node: node.target in ("size", "numel", "stride"))
    return any(node.op == "placeholder" and not op_of(node).is_number for node in sources)
