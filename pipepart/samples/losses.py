"""The loss functions and loss modules of torch: their sums over samples, and their denominators."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import nn

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import OpMeta, op_of, set_op, shape_of
from pipepart.samples.follow import Following, Unknown, before, name_of
from pipepart.samples.forms import Form, Ratio, Share, Sum
from pipepart.samples.quantities import Quantities, count_targets

__all__ = ["LossCall", "call_of", "loss_form"]

_BY_TARGET = ("cross_entropy", "nll_loss")
"""Sums that are divided by the weights of the targets."""
_BY_ELEMENT = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss",
)  # fmt: skip
"""Means over all elements."""
_BY_SAMPLE = (
    "cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "ctc_loss",
)  # fmt: skip
"""Means over samples."""
_FUNCTIONS: dict[str, Any] = {name: getattr(F, name) for name in (*_BY_TARGET, *_BY_ELEMENT, *_BY_SAMPLE)}

_MODULES: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy", nn.NLLLoss: "nll_loss", nn.MSELoss: "mse_loss", nn.L1Loss: "l1_loss",
    nn.SmoothL1Loss: "smooth_l1_loss", nn.HuberLoss: "huber_loss", nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits", nn.KLDivLoss: "kl_div", nn.PoissonNLLLoss: "poisson_nll_loss",
    nn.GaussianNLLLoss: "gaussian_nll_loss", nn.SoftMarginLoss: "soft_margin_loss",
    nn.HingeEmbeddingLoss: "hinge_embedding_loss", nn.CosineEmbeddingLoss: "cosine_embedding_loss",
    nn.MarginRankingLoss: "margin_ranking_loss", nn.TripletMarginLoss: "triplet_margin_loss",
    nn.MultiMarginLoss: "multi_margin_loss", nn.MultiLabelMarginLoss: "multilabel_margin_loss",
    nn.MultiLabelSoftMarginLoss: "multilabel_soft_margin_loss", nn.CTCLoss: "ctc_loss",
}  # fmt: skip
_ATTRIBUTES = (
    "weight", "ignore_index", "label_smoothing", "reduction", "pos_weight", "beta", "delta", "log_target", "log_input",
    "full", "eps", "margin", "p", "swap", "blank", "zero_infinity",
)  # fmt: skip

_WEIGHTED = ("mse_loss", "l1_loss", "huber_loss")
"""Losses by element that are divided by the sum of their weights, if there are any."""

_NEVER_IGNORED = ("argmax", "argmin", "arange", "randint", "multinomial", "argsort", "one_hot", "zeros", "bucketize")
"""Ops whose results are never negative."""


_KEEP_VALUES = ("view", "reshape", "flatten", "contiguous", "detach", "to", "long")


@dataclass(frozen=True)
class LossCall:
    """A call of a loss function or of a loss module."""

    node: fx.Node
    name: str
    """The name of the function."""
    arguments: dict[str, Any]
    """Arguments by the parameter names of the function."""
    path: str | None
    """The path of the module; None for a call of the function."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def reduction(self) -> str:
        if self.get("size_average") is not None or self.get("reduce") is not None:
            return nn._reduction.legacy_get_string(self.get("size_average"), self.get("reduce"), emit_warning=False)
        return str(self.get("reduction", "mean"))

    def summed(self, graph: fx.Graph) -> fx.Node:
        """Write the same loss as a sum."""
        arguments = {**self.arguments, "reduction": "sum"}
        for key in ("size_average", "reduce"):
            arguments.pop(key, None)
        for key in ("weight", "pos_weight"):
            if self.path is not None and isinstance(arguments.get(key), torch.Tensor):
                arguments[key] = graph.get_attr(f"{self.path}.{key}")
        return graph.call_function(_FUNCTIONS[self.name], (), arguments)


def loss_form(node: fx.Node, quantities: Quantities) -> Form | None:
    """Return the form of a loss of torch; None if the node is not such a loss. Raises `Unknown`."""
    recording, follow = quantities.recording, quantities.follow
    call = call_of(node, recording)
    if call is None:
        return None
    by_element, by_target = call.name in _BY_ELEMENT, call.name in _BY_TARGET
    scores = call.get("input", call.get("log_probs", call.get("input1", call.get("anchor"))))
    if not isinstance(scores, fx.Node):
        raise Unknown(node, "its input is not a recorded tensor")
    if call.name in _WEIGHTED and call.get("weight") is not None:
        return _weighted_mean(call, quantities)
    over = [value for value in call.arguments.values() if isinstance(value, fx.Node) and follow.depends(value)]
    ragged = [value for value in over if follow.ragged(value)]
    if not ragged:
        _check_aligned(call, over, follow)
    if call.reduction == "sum" or (call.reduction == "batchmean" and not ragged and 0 not in follow.dims(scores)):
        return Sum(node)
    if by_target and not _is_floating(call.get("target"), recording):
        return _by_target(call, quantities)
    if not ragged:
        return Share(node)
    if not by_element and not by_target:
        raise Unknown(node, "the denominator of this loss on a selection is not known")
    rows = quantities.count_rows(next((value for value in ragged if follow.pure(value)), ragged[0]))
    per_row = scores if by_element and call.reduction == "mean" else None
    if per_row is not None and not follow.ragged(per_row):
        raise Unknown(node, "its target is a selection, but its input is not")
    if by_target and len(shape_of(scores)) != 2:
        raise Unknown(node, "the denominator for targets of several dimensions on a selection is not known")
    return Ratio(node, rows, call.summed, per_row)


def call_of(node: fx.Node, recording: Recording) -> LossCall | None:
    """Return the loss of torch that a node calls; None for other nodes. Raises `Unknown` for a module with hooks."""
    if node.op == "call_module":
        module = resolve(recording.root, str(node.target))
        name = _MODULES.get(type(module))
        if name is None:
            return None
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise Unknown(node, "the module has hooks")
        names = _parameters_of(_FUNCTIONS[name])
        inputs = _parameters_of(type(module).forward)[1:]
        given = {**dict(zip(inputs, node.args)), **node.kwargs}
        if name == "poisson_nll_loss" and "log_input" in given:  # the module has this name for its input
            given["input"] = given.pop("log_input")
        fixed = {key: getattr(module, key) for key in _ATTRIBUTES if hasattr(module, key) and key in names}
        return LossCall(node, name, {**fixed, **given}, str(node.target))
    name = name_of(node)
    if node.op != "call_function" or _FUNCTIONS.get(name) is not node.target:
        return None
    arguments = {**dict(zip(_parameters_of(node.target), node.args)), **node.kwargs}
    return LossCall(node, name, arguments, None)


@cache
def _parameters_of(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _is_floating(target: Any, recording: Recording) -> bool:
    if not isinstance(target, fx.Node):
        return False
    if target.op == "get_attr":
        path = str(target.target)
        value = recording.constants[path] if path in recording.constants else resolve(recording.root, path)
        return bool(value.dtype.is_floating_point)
    dtype = op_of(target).dtype
    return dtype is not None and bool(dtype.is_floating_point)


def _check_aligned(call: LossCall, over: list[fx.Node], follow: Following) -> None:
    """Check that each operand has one dimension of samples, the same in all (after broadcasting, for losses by element)."""
    places = set()
    for operand in over:
        dims = follow.dims(operand)
        if len(dims) > 1:
            raise Unknown(call.node, "an operand has several dimensions of samples")
        if dims:
            rank = len(shape_of(operand))
            places.add(dims[0] - rank if call.name in _BY_ELEMENT else dims[0])
            if call.name in _BY_TARGET and operand is call.get("input") and dims[0] == min(1, rank - 1):
                raise Unknown(call.node, "its classes are samples")
    if not places or (len(places) > 1 and call.name != "ctc_loss"):
        raise Unknown(call.node, "its operands have the samples in different dimensions")


def _by_target(call: LossCall, quantities: Quantities) -> Form:
    recording, follow = quantities.recording, quantities.follow
    target, weight = call.get("target"), call.get("weight")
    ignored = call.get("ignore_index", -100)
    made = weight is None and not follow.pure(target) and not follow.ragged(target)
    if made and ignored < 0:
        source = before(target, _KEEP_VALUES)
        if name_of(source) in _NEVER_IGNORED:
            return Share(call.node)
    if isinstance(weight, torch.Tensor):
        with recording.graph.inserting_before(call.node):
            weight = recording.graph.get_attr(f"{call.path}.weight")
        set_op(weight, OpMeta())
        follow.add_buffer(weight)
    count = quantities.count(call.node, count_targets, (target, ignored, weight))
    return Ratio(call.node, count, call.summed)


def _weighted_mean(call: LossCall, quantities: Quantities) -> Form:
    weight = call.get("weight")
    if call.reduction == "sum":
        return Sum(call.node)
    if not isinstance(weight, fx.Node) or not quantities.follow.depends(weight):
        raise Unknown(call.node, "its weights are not part of the batch")
    return Ratio(call.node, quantities.count(call.node, "sum", (weight,)), call.summed)
