"""How many rows a selection has (`x[mask]`, `x.masked_select(mask)`), from the mask alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import nn

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import op_of, shape_of
from pipepart.samples.calls import argument, name_of
from pipepart.samples.follow import Following, Unknown
from pipepart.samples.quantities import Quantities, Quantity

__all__ = ["count_rows", "size_of_first", "true_elements"]

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
"""Ops whose result has the rows of its operands, each from the same row of them."""

_ROWWISE_MODULES = (
    nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU,
    nn.LeakyReLU, nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.LogSigmoid, nn.PReLU, nn.Hardtanh, nn.Mish, nn.CELU,
)  # fmt: skip


def true_elements(mask: torch.Tensor) -> torch.Tensor:
    """How many elements of a mask are set."""
    return torch.count_nonzero(mask)


def size_of_first(tensor: torch.Tensor) -> torch.Tensor:
    """The size of dimension 0 as a tensor."""
    return torch.tensor(tensor.shape[0])


true_elements.adds_up = size_of_first.adds_up = True  # type: ignore[attr-defined]


def count_rows(node: fx.Node, recording: Recording, follow: Following, quantities: Quantities) -> Quantity:
    """The size of dimension 0 of a tensor whose shape depends on the contents of the batch."""
    if follow.pure(node):
        return quantities.count(node, size_of_first, (node,))
    if not follow.ragged(node):
        raise Unknown(node, "it has another number of rows than the selection that it is combined with")
    name = name_of(node)
    source, index = argument(node, 0, "input"), argument(node, 1, "mask")
    if name in ("getitem", "masked_select", "index_select"):
        return _selected(node, name, source, index, follow, quantities)
    rowwise = name in _ROWWISE
    if node.op == "call_module":
        rowwise = type(resolve(recording.root, str(node.target))) in _ROWWISE_MODULES
    sources = [s for s in node.all_input_nodes if follow.depends(s) and (follow.ragged(s) or op_of(s).shape)]
    if not rowwise or not sources or not all(follow.ragged(s) for s in sources):
        raise Unknown(node, f"the number of its rows is not known from the batch ({name or node.target})")
    counts = [count_rows(s, recording, follow, quantities) for s in sources]
    return counts[0]


def _selected(node: fx.Node, name: str, source: Any, index: Any, follow: Following, quantities: Quantities) -> Quantity:
    if name == "index_select":
        index = argument(node, 2, "index") if argument(node, 1, "dim") == 0 else None
    if isinstance(index, (tuple, list)) and index and all(isinstance(i, fx.Node) for i in index):
        index = index[0]  # of several lists of positions, or of masks, the first says how many
    if not isinstance(index, fx.Node) or not isinstance(source, fx.Node) or op_of(index).shape is None:
        raise Unknown(node, "what it selects is not known from the batch")
    mask, shape = op_of(index), op_of(source).shape
    if mask.dtype == torch.bool:
        if name == "masked_select" and mask.shape != shape:
            raise Unknown(node, "the mask has another shape than what it selects from")
        if not follow.ragged(index) and 0 not in follow.dims(index):
            raise Unknown(node, "the mask does not go over the samples")
        return quantities.count(node, true_elements, (index,))
    if mask.dtype in (torch.int64, torch.int32) and len(shape_of(index)) == 1:
        return quantities.count(node, size_of_first, (index,))
    raise Unknown(node, "what it selects is not known from the batch")
