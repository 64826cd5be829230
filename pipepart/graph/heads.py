"""Heads: a linear layer whose scores go to a cross-entropy and nowhere else, as in a language model.

```
hidden -- linear --> scores -- view, shift, float ... --> cross_entropy --> loss
```

The scores have one number for each token and each word of the vocabulary. If only views and conversions lie between, the
same views can be applied to the hidden states, and the scores can be made and used for some tokens at a time. Anything else
that reads the scores (an output, a metric) needs all of them: such a head stays whole, and the reason is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import nn

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import op_of, shape_of, where_is
from pipepart.recording.recorded_run.ops import has_global_hooks
from pipepart.samples.follow import Unknown, argument, name_of
from pipepart.samples.losses import LossCall, call_of

__all__ = ["FoundHeads", "Head", "find_heads", "is_size", "keeps_numbers", "sizes_of"]

_SAME = ("contiguous", "clone")
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_SWAPS = ("transpose", "swapaxes", "swapdims")
_STEPS = (*_SAME, *_CASTS, *_SWAPS, "to", "view", "reshape", "flatten", "permute", "getitem")


class _Whole(Exception):
    """The reason why a head cannot be run in slices."""


@dataclass(frozen=True, eq=False)
class Head:
    """A head in the graph of a recording."""

    linear: fx.Node
    steps: tuple[fx.Node, ...]
    """Views and conversions between the linear layer and the loss, in order."""
    loss: LossCall
    hidden: fx.Node
    """The input of the linear layer."""
    weight: fx.Node | str
    """The parameter, or its path."""
    bias: fx.Node | str | None
    class_dims: Mapping[fx.Node, int]
    """The dimension of the classes in the scores, and in the result of each step."""
    casts: tuple[torch.dtype, ...]
    """The types to which the scores are converted, in order."""

    @property
    def ops(self) -> tuple[fx.Node, ...]:
        return (self.linear, *self.steps, self.loss.node)

    @property
    def classes(self) -> int:
        """The size of the vocabulary."""
        return shape_of(self.linear)[-1]

    @property
    def features(self) -> int:
        """The size of a hidden state."""
        return shape_of(self.hidden)[-1]


@dataclass(frozen=True)
class FoundHeads:
    """The heads of a recording, and the reasons why other losses are not the end of one."""

    heads: tuple[Head, ...]
    reasons: tuple[str, ...]


def find_heads(recording: Recording) -> FoundHeads:
    """Find the heads whose scores nothing else reads."""
    heads, reasons = [], []
    for node in recording.graph.nodes:
        try:
            call = call_of(node, recording)
            if call is not None and call.name == "cross_entropy":
                heads.append(_head(call, recording))
        except (_Whole, Unknown) as why:
            reasons.append(f"the loss in {where_is(node)}: {why}")
    if not heads and not reasons:
        reasons.append("the step has no cross-entropy of torch")
    return FoundHeads(tuple(heads), tuple(reasons))


def is_size(node: fx.Node) -> bool:
    """Return whether an op reads one size of a tensor."""
    return node.target == "size" and len(node.args) == 2 and isinstance(node.args[1], int) and op_of(node).is_number


def keeps_numbers(step: fx.Node) -> bool:
    """Return whether a step converts or copies the scores, and leaves their shape."""
    name = name_of(step)
    return name in _SAME or name in _CASTS or name == "to"


def _head(call: LossCall, recording: Recording) -> Head:
    _check_loss(call)
    steps: list[fx.Node] = []
    user, scores = call.node, call.get("input")
    while True:
        if not isinstance(scores, fx.Node) or scores.op in ("placeholder", "get_attr"):
            raise _Whole("its scores do not come from a linear layer")
        _check_alone(scores, user)
        parts = _linear(scores, recording)
        if parts is not None:
            break
        if name_of(scores) not in _STEPS or op_of(scores).shape is None or not scores.args:
            raise _Whole(f"its scores go through {_called(scores)}")
        steps.append(scores)
        user, scores = scores, scores.args[0]
    steps.reverse()
    hidden, weight, bias = parts
    dims, casts, source = {scores: len(shape_of(scores)) - 1}, [], scores
    for step in steps:
        dims[step] = _class_dim(step, dims[source], source, shape_of(scores)[-1])
        casts += _cast(step)
        source = step
    if dims[source] != min(1, len(shape_of(source)) - 1):
        raise _Whole("the classes of its scores are not where the linear layer has written them")
    head = Head(scores, tuple(steps), call, hidden, weight, bias, dims, tuple(casts))
    _check_surroundings(head, recording)
    return head


def _check_loss(call: LossCall) -> None:
    target = call.get("target")
    if call.get("size_average") is not None or call.get("reduce") is not None or call.reduction not in ("mean", "sum"):
        raise _Whole("it is not a mean or a sum over all tokens")
    if not isinstance(target, fx.Node) or target.op == "get_attr" or op_of(target).dtype is None:
        raise _Whole("its targets are not computed in the step")
    if op_of(target).dtype.is_floating_point:  # type: ignore[union-attr]
        raise _Whole("its targets are probabilities")
    if any(isinstance(call.get(name), fx.Node) for name in ("ignore_index", "label_smoothing")):
        raise _Whole("its settings are computed in the step")
    weight = call.get("weight")
    if isinstance(weight, fx.Node) and weight.op != "get_attr" and op_of(weight).requires_grad:
        raise _Whole("the weights of its classes are trained")


def _check_alone(scores: fx.Node, user: fx.Node) -> None:
    for other in scores.users:
        if other is user or is_size(other):
            continue
        what = "are an output of the step" if other.op == "output" else f"are also read by {_called(other)}"
        raise _Whole(f"its scores {what}")


def _called(node: fx.Node) -> str:
    name = str(node.target) if node.op == "call_module" else name_of(node) or str(node.target)
    return f"{name!r} ({where_is(node)})"


def _linear(node: fx.Node, recording: Recording) -> tuple[fx.Node, fx.Node | str, fx.Node | str | None] | None:
    """Return input, weight and bias of a linear layer; None for another op."""
    weight: Any
    if node.op == "call_module":
        layer = resolve(recording.root, str(node.target))
        if type(layer) is not nn.Linear:
            raise _Whole(f"its scores are made by {_called(node)}, which is not a linear layer")
        if not _is_plain(layer) or len(node.args) != 1 or node.kwargs:
            raise _Whole(f"the linear layer {node.target!r} has hooks, or a forward of its own")
        hidden, path = node.args[0], str(node.target)
        weight, bias = f"{path}.weight", None if layer.bias is None else f"{path}.bias"
    elif node.target is F.linear:
        hidden, weight = argument(node, 0, "input"), argument(node, 1, "weight")
        bias = argument(node, 2, "bias")
        if any(isinstance(part, fx.Node) and part.op != "get_attr" for part in (weight, bias)):
            raise _Whole("the weight of its linear layer is computed in the step")
    else:
        return None
    if not isinstance(hidden, fx.Node) or hidden.op == "get_attr" or op_of(hidden).shape is None:
        raise _Whole("the input of its linear layer is not computed in the step")
    if len(shape_of(node)) != len(shape_of(hidden)):
        raise _Whole("the weight of its linear layer is no matrix")
    return hidden, weight, bias


def _is_plain(layer: nn.Module) -> bool:
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not (hooks or "forward" in vars(layer) or has_global_hooks())


def _check_surroundings(head: Head, recording: Recording) -> None:
    kinds = {(op.grad_mode, op.autocast, op.switches, op.checkpoint) for op in map(op_of, head.ops)}
    if len(kinds) > 1:
        raise _Whole("its scores and its loss are computed in different modes")
    nodes = list(recording.graph.nodes)
    later = nodes[nodes.index(head.linear) :]
    memory = op_of(head.hidden).writes
    if any(op_of(node).mutates for node in head.ops) or any(memory & op_of(node).mutates for node in later):
        raise _Whole("its scores, or the hidden states, are changed in place")


def _cast(step: fx.Node) -> list[torch.dtype]:
    """Return the type to which a step converts the scores."""
    name = name_of(step)
    if name in _CASTS:
        return [_CASTS[name]]
    return [
        value for value in (*step.args[1:], *step.kwargs.values()) if name == "to" and isinstance(value, torch.dtype)
    ]


def sizes_of(step: fx.Node) -> tuple[Any, ...] | None:
    """Return the sizes that a view asks for; None for other ops."""
    if name_of(step) not in ("view", "reshape"):
        return None
    sizes: Sequence[Any] = step.args[1:] or tuple(step.kwargs.values())
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    return tuple(sizes)


def _class_dim(step: fx.Node, at: int, source: fx.Node, classes: int) -> int:
    """Return the dimension of the classes after a step, from that before it."""
    name, rank, shape = name_of(step), len(shape_of(source)), shape_of(step)
    others = [*step.args[1:], *step.kwargs.values()]
    if keeps_numbers(step):
        if any(isinstance(arg, fx.Node) for arg in others) or (name == "to" and op_of(step).dtype is None):
            raise _Whole(f"its scores are converted by {_called(step)} to the type of another tensor")
        return at
    sizes = sizes_of(step)
    if sizes is not None:
        if at == rank - 1 and shape[-1:] == (classes,) and not any(isinstance(s, torch.dtype) for s in sizes):
            return len(shape) - 1
    elif name == "flatten":
        start, end = (argument(step, 1, "start_dim", 0), argument(step, 2, "end_dim", -1))
        if isinstance(start, int) and isinstance(end, int):
            start, end = start % rank, end % rank
            if end < at:
                return at - (end - start)
            if start > at:
                return at
    elif name in _SWAPS and len(others) == 2 and all(isinstance(dim, int) for dim in others):
        a, b = (int(dim) % rank for dim in others)  # type: ignore[arg-type]
        return {a: b, b: a}.get(at, at)
    elif name == "permute":
        dims = others[0] if len(others) == 1 and isinstance(others[0], (tuple, list)) else others
        if all(isinstance(dim, int) for dim in dims):  # type: ignore[union-attr]
            return [int(dim) % rank for dim in dims].index(at)  # type: ignore[union-attr,arg-type]
    elif name == "getitem":
        return _after_index(step, step.args[1], at, rank, len(shape))
    raise _Whole(f"its scores go through {_called(step)}")


def _after_index(step: fx.Node, index: Any, at: int, rank: int, result: int) -> int:
    """Return the dimension of the classes after an index that takes all of them."""
    if isinstance(index, fx.Node) and not op_of(index).is_number:  # a selection of tokens by a mask or by numbers
        taken = len(shape_of(index)) if op_of(index).dtype == torch.bool else 1
        if at == rank - 1 and taken <= at:
            return result - 1
        raise _Whole(f"its scores go through {_called(step)}")
    entries = list(index) if isinstance(index, tuple) else [index]
    plain = all(
        entry is None or entry is Ellipsis or isinstance(entry, (slice, int)) or _is_number(entry) for entry in entries
    )
    if not plain or any(isinstance(entry, bool) for entry in entries):
        raise _Whole(f"its scores go through {_called(step)}")
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    hole = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    full: list[Any] = [slice(None)] * (rank - named)
    old = new = 0
    for entry in [*entries[:hole], *full, *entries[hole + 1 :]]:
        if entry is None:
            new += 1
            continue
        if old == at:
            if entry != slice(None):
                raise _Whole(f"{_called(step)} takes some of the classes of its scores")
            return new
        old, new = old + 1, new + isinstance(entry, slice)
    raise AssertionError("an index has an entry for each dimension")


def _is_number(entry: Any) -> bool:
    return isinstance(entry, fx.Node) and op_of(entry).is_number
