"""The loss functions and loss modules of torch: what they sum over samples, and what they divide by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import nn

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import OpMeta, op_of, set_op, shape_of
from pipepart.samples.calls import name_of, parameters_of
from pipepart.samples.follow import Following, Unknown
from pipepart.samples.forms import Form, Ratio, Share, Sum
from pipepart.samples.quantities import Quantities, count_targets
from pipepart.samples.rows import count_rows

__all__ = ["loss_form"]

_BY_TARGET = {"cross_entropy": F.cross_entropy, "nll_loss": F.nll_loss}
"""Divided by the weights of the targets."""
_BY_ELEMENT = {
    function.__name__: function
    for function in (
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
        F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss,
    )
}  # fmt: skip
"""Means over all elements."""
_BY_SAMPLE = {
    function.__name__: function
    for function in (
        F.cosine_embedding_loss, F.margin_ranking_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
        F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.ctc_loss,
    )
}  # fmt: skip
"""Means over samples."""
_FUNCTIONS: dict[str, Any] = {**_BY_TARGET, **_BY_ELEMENT, **_BY_SAMPLE}

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

_NEVER_IGNORED = ("argmax", "argmin", "arange", "randint", "multinomial", "argsort", "one_hot", "zeros", "bucketize")
"""Ops whose results are never negative."""


@dataclass(frozen=True)
class _Call:
    """A call of a loss, of a function or of a module alike."""

    node: fx.Node
    name: str
    arguments: dict[str, Any]
    """By the names of the function."""
    path: str | None
    """The path of the module."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def summed(self, graph: fx.Graph) -> fx.Node:
        """The same loss as a sum."""
        arguments = {**self.arguments, "reduction": "sum"}
        for key in ("size_average", "reduce"):
            arguments.pop(key, None)
        for key in ("weight", "pos_weight"):
            if self.path is not None and isinstance(arguments.get(key), torch.Tensor):
                arguments[key] = graph.get_attr(f"{self.path}.{key}")
        return graph.call_function(_FUNCTIONS[self.name], (), arguments)


def loss_form(node: fx.Node, recording: Recording, follow: Following, quantities: Quantities) -> Form | None:
    """The form of a loss of torch; None if the node is none. Raises `Unknown`."""
    call = _call_of(node, recording)
    if call is None:
        return None
    reduction = _reduction_of(call)
    scores = call.get("input", call.get("log_probs", call.get("input1", call.get("anchor"))))
    if not isinstance(scores, fx.Node):
        raise Unknown(node, "its input is no recorded tensor")
    over = [value for value in call.arguments.values() if isinstance(value, fx.Node) and follow.depends(value)]
    if (
        call.name in _BY_ELEMENT
        and call.get("weight") is not None
        and call.name in ("mse_loss", "l1_loss", "huber_loss")
    ):
        return _weighted_mean(call, reduction, scores, over, follow, quantities)
    ragged = any(follow.ragged(value) for value in over)
    if not ragged:
        _check_aligned(call, over, follow)
    if reduction == "sum" or (reduction == "batchmean" and not ragged and 0 not in follow.dims(scores)):
        return Sum(node)
    if call.name in _BY_TARGET and not _is_floating(call.get("target"), recording):
        return _by_target(call, recording, follow, quantities)
    if not ragged:
        return Share(node)
    if call.name not in _BY_ELEMENT and call.name not in _BY_TARGET:
        raise Unknown(node, "a loss of this kind on a selection")
    rows = count_rows(_first_ragged(over, follow), recording, follow, quantities)
    per_row = scores if call.name in _BY_ELEMENT and reduction == "mean" else None
    if per_row is not None and not follow.ragged(per_row):
        raise Unknown(node, "its input is no selection, and its target is one")
    if call.name in _BY_TARGET and len(shape_of(scores)) != 2:
        raise Unknown(node, "targets of several dimensions on a selection")
    return Ratio(node, rows, call.summed, per_row)


def _call_of(node: fx.Node, recording: Recording) -> _Call | None:
    if node.op == "call_module":
        module = resolve(recording.root, str(node.target))
        name = _MODULES.get(type(module))
        if name is None:
            return None
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise Unknown(node, "the module has hooks")
        names = parameters_of(_FUNCTIONS[name])
        inputs = parameters_of(type(module).forward)[1:]
        given = {**dict(zip(inputs, node.args)), **node.kwargs}
        fixed = {key: getattr(module, key) for key in _ATTRIBUTES if hasattr(module, key) and key in names}
        return _Call(node, name, {**fixed, **{_renamed(name, k): v for k, v in given.items()}}, str(node.target))
    name = name_of(node)
    if node.op != "call_function" or _FUNCTIONS.get(name) is not node.target:
        return None
    arguments = {**dict(zip(parameters_of(node.target), node.args)), **node.kwargs}
    return _Call(node, name, arguments, None)


def _renamed(name: str, key: str) -> str:
    """Modules and functions do not name their arguments alike."""
    return {"poisson_nll_loss": {"log_input": "input"}}.get(name, {}).get(key, key)


def _reduction_of(call: _Call) -> str:
    if call.get("size_average") is not None or call.get("reduce") is not None:
        return nn._reduction.legacy_get_string(call.get("size_average"), call.get("reduce"), emit_warning=False)
    return str(call.get("reduction", "mean"))


def _is_floating(target: Any, recording: Recording) -> bool:
    if not isinstance(target, fx.Node):
        return False
    if target.op == "get_attr":
        path = str(target.target)
        value = recording.constants[path] if path in recording.constants else resolve(recording.root, path)
        return bool(value.dtype.is_floating_point)
    dtype = op_of(target).dtype
    return dtype is not None and bool(dtype.is_floating_point)


def _check_aligned(call: _Call, over: list[fx.Node], follow: Following) -> None:
    """Each operand has the samples once, all in the same place (after broadcasting, for losses by element)."""
    places = set()
    for operand in over:
        dims = follow.dims(operand)
        if len(dims) > 1:
            raise Unknown(call.node, "samples meet samples in its operands")
        if dims:
            rank = len(shape_of(operand))
            places.add(dims[0] - rank if call.name in _BY_ELEMENT else dims[0])
            if call.name in _BY_TARGET and operand is call.get("input") and dims[0] == min(1, rank - 1):
                raise Unknown(call.node, "its classes are samples")
    if not places or (len(places) > 1 and call.name != "ctc_loss"):
        raise Unknown(call.node, "its operands have the samples in different dimensions")


def _by_target(call: _Call, recording: Recording, follow: Following, quantities: Quantities) -> Form:
    target, weight = call.get("target"), call.get("weight")
    ignored = call.get("ignore_index", -100)
    made = weight is None and not follow.pure(target) and not follow.ragged(target)
    if made and ignored < 0 and name_of(_source(target)) in _NEVER_IGNORED:
        return Share(call.node)
    if isinstance(weight, torch.Tensor):
        with recording.graph.inserting_before(call.node):
            weight = recording.graph.get_attr(f"{call.path}.weight")
        set_op(weight, OpMeta())
        follow.take(weight)
    count = quantities.count(call.node, count_targets, (target, ignored, weight))
    return Ratio(call.node, count, call.summed)


def _source(node: Any) -> Any:
    while isinstance(node, fx.Node) and name_of(node) in (
        "view",
        "reshape",
        "flatten",
        "contiguous",
        "detach",
        "to",
        "long",
    ):
        node = node.args[0]
    return node


def _weighted_mean(
    call: _Call, reduction: str, scores: fx.Node, over: list[fx.Node], follow: Following, quantities: Quantities
) -> Form:
    weight = call.get("weight")
    if reduction == "sum":
        return Sum(call.node)
    if not isinstance(weight, fx.Node) or not follow.depends(weight):
        raise Unknown(call.node, "its weights are not part of the batch")
    return Ratio(call.node, quantities.count(call.node, "sum", (weight,)), call.summed)


def _first_ragged(over: list[fx.Node], follow: Following) -> fx.Node:
    return next((v for v in over if follow.ragged(v) and follow.pure(v)), next(v for v in over if follow.ragged(v)))
