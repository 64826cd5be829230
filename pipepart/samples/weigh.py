"""Weights of the whole batch, written into a recording: its loss and logs become sums over micro-batches.

A micro-batch that divides by its own number of tokens weights its tokens differently from those of other micro-batches.
Each term of a loss is therefore computed as a sum, and divided by a number of the whole batch, an input of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording import Input, Recording
from pipepart.recording.op import op_of, set_op
from pipepart.samples.batch_numbers import Numbers
from pipepart.samples.emission import Emission, Scope
from pipepart.samples.follow import Following, Unknown, outputs_of
from pipepart.samples.forms import Form, Ratio, Share, Sum, denominators, is_plain_sum, law_of_output, parts_of
from pipepart.samples.quantities import Quantities, Quantity, Swap
from pipepart.samples.terms import Terms

__all__ = ["Weighed", "unweighed", "weigh"]

_HOST = torch.device("cpu")
_SWAPPED = (
    "samples are computed with a number of their batch (such as w / w.sum()): each batch is exact, and accumulated batches "
    "use the number of their own batch, as on one device"
)


@dataclass(frozen=True, eq=False)
class Weighed:
    """A recording whose outputs of micro-batches can be merged into those of the whole batch."""

    recording: Recording
    """The recording with further inputs, and with the root of the gradients as a further output where it is needed."""
    laws: tuple[str, ...]
    """For each output, the law that merges micro-batches: "sum", "mean" (weighted by samples), "batch" (concatenated along
    dimension 0), "constant", or "unknown" (merged as a mean, which may be wrong)."""
    numbers: Numbers
    """Computes the values of the further inputs for a batch."""
    origins: Mapping[str, str]
    """The op of the given recording from which each op comes, or for which it stands, by name."""
    reasons: Mapping[int, str]
    """For each output whose law is unknown, the op at which the walk to its terms stopped."""
    totals_in_training: bool = False
    totals_always: bool = False
    needs_window: bool = False
    """Whether the root of the gradients is divided by numbers of all batches of a `Window`, if there is one."""
    notes: tuple[str, ...] = ()
    """Reasons why accumulated batches cannot be exact together."""

    def needs_totals(self, train: bool) -> bool:
        """Return whether numbers of all replicas are needed: to train, or for values that are averaged over replicas."""
        return self.totals_always or (train and self.totals_in_training)

    def chunk_of(self, given: Mapping[str, int]) -> dict[str, int]:
        """Return the chunk of each op, from the chunks of the ops of the given recording."""
        return {new: given[old] for new, old in self.origins.items() if old in given}


def unweighed(recording: Recording, counts: bool = False) -> Weighed:
    """Return a recording as it is: each micro-batch divides by its own numbers and is weighted by its share of samples."""
    values = outputs_of(recording.graph)
    laws = tuple(_law_unknown(value, counts) if isinstance(value, fx.Node) else "constant" for value in values)
    numbers = Numbers(Quantities(recording, Following(recording)), {}, None, 1)
    return Weighed(recording, laws, numbers, {node.name: node.name for node in recording.ops}, {})


def weigh(
    recording: Recording,
    replicas: int = 1,
    averaged: Collection[int] = (),
    device: torch.device = _HOST,
    untouched: Collection[int] = (),
    accumulates: bool = False,
    counts: bool = False,
) -> Weighed:
    """Find the terms of the loss and of all other outputs, and write their weights into a copy of the graph.

    `averaged` are outputs that are averaged over replicas later. They get values whose mean is that of the whole batch of
    all replicas; other outputs are those of the batch of this replica. `untouched` are outputs that stay as they are.
    With `accumulates`, batches may be accumulated, and a loss with several denominators gets a root of its own, which is
    divided by the numbers of all of them. With `counts`, Python numbers of the result become those of the whole batch.
    """
    copy, origins = _copied(recording)
    quantities = Quantities(copy, Following(copy))
    if not quantities.follow.known:
        return unweighed(recording, counts)
    outputs = _outputs(quantities, untouched, counts)
    loss = outputs[recording.loss_index] if recording.loss_index is not None else _Output(None, "constant")
    divided = denominators(loss.form) if loss.form is not None else set()
    trained = loss.form is not None and recording.training and loss.law in ("sum", "mean")
    needs_window = accumulates and trained and len(divided) > 1 and not loss.swaps
    rooted = trained and (replicas > 1 or needs_window)
    joint: set[int] = set()
    if replicas > 1:
        joint = {i for i, one in enumerate(outputs) if one.form and (i in averaged or (rooted and one.swaps))}
    emission = Emission(copy.graph, replicas, device)
    outputs = [_written(one, i in joint, emission) for i, one in enumerate(outputs)]
    root = recording.loss_index
    if rooted:
        assert loss.form is not None
        root = len(outputs)
        outputs.append(_Output(emission.write(loss.form, Scope.WINDOW if needs_window else Scope.ALL), "sum"))
    swaps = dict.fromkeys(swap for one in outputs for swap in one.swaps)
    scope = Scope.ALL if joint or rooted else Scope.OWN
    for swap in swaps:
        emission.announce(swap, scope)
    quantities.take_checks()
    # Numbers are computed on the whole batch, also by ops that get a number of the whole batch in micro-batches.
    numbers = Numbers(quantities, emission.inputs, next(iter(divided)) if len(divided) == 1 else None, replicas)
    for swap in swaps:
        emission.swap(swap, scope)
    forms = [part for one in outputs if one.form is not None for part in parts_of(one.form)]
    emission.finish([one.value for one in outputs], forms)
    added = {**quantities.origins, **emission.origins}
    return Weighed(
        replace(copy, loss_index=root, inputs=(*copy.inputs, *(Input(n, n, "number") for n in numbers.inputs))),
        tuple(one.law for one in outputs),
        numbers,
        {**origins, **{new: origins[old] for new, old in added.items()}},
        {i: one.reason for i, one in enumerate(outputs) if one.reason},
        totals_in_training=rooted and replicas > 1,
        totals_always=(bool(joint) and not rooted) or bool(set(averaged) & joint),
        needs_window=needs_window,
        notes=(_SWAPPED,) if loss.swaps else (),
    )


@dataclass(frozen=True, eq=False)
class _Output:
    """One output of a recording."""

    value: Any
    law: str
    form: Form | None = None
    swaps: tuple[Swap, ...] = ()
    """Arguments of ops above its terms that must be numbers of the whole batch."""
    reason: str = ""
    """The op at which the walk to its terms stopped."""
    number: Quantity | None = None
    """The number of the whole batch that takes its place."""


def _outputs(quantities: Quantities, untouched: Collection[int], counts: bool) -> list[_Output]:
    terms = Terms(quantities)
    found = []
    for index, value in enumerate(outputs_of(quantities.recording.graph)):
        try:
            if index in untouched and isinstance(value, fx.Node):
                raise Unknown(value, "it is merged in another way")
            if counts and isinstance(value, fx.Node) and op_of(value).is_number:
                found.append(_number(value, quantities))
                continue
            found.append(_output(value, quantities, terms))
        except Unknown as unknown:
            found.append(_Output(value, _law_unknown(value, counts), reason=str(unknown)))
    return found


def _output(value: Any, quantities: Quantities, terms: Terms) -> _Output:
    follow = quantities.follow
    if not isinstance(value, fx.Node) or value.op == "get_attr" or not follow.depends(value):
        return _Output(value, "constant")
    meta = op_of(value)
    if meta.is_number or meta.shape is None:
        raise Unknown(value, "it is not a tensor")
    if follow.ragged(value):
        raise Unknown(value, "its shape depends on the contents of the batch")
    if follow.dims(value):
        if follow.dims(value) == (0,):
            return _Output(value, "batch")
        raise Unknown(value, "its samples are not in dimension 0")
    form = terms.form(value)
    sums = [one.node for one in parts_of(form) if isinstance(one, (Sum, Share, Ratio))]
    swaps = tuple(swap for node in sums for swap in quantities.swaps(node))
    return _Output(value, law_of_output(form), form, swaps)


def _law_unknown(value: Any, counts: bool) -> str:
    number = counts and isinstance(value, fx.Node) and value.op != "get_attr" and op_of(value).is_number
    return "unknown number" if number else "unknown"


def _number(value: fx.Node, quantities: Quantities) -> _Output:
    """Return a Python number of the result: a size, or a number that is computed from sizes and from the batch."""
    law = "count" if _is_integer(value) else "constant"
    if not quantities.follow.depends(value):
        return _Output(value, law)
    return _Output(value, law, number=quantities.of(value))


_KEEP_INTEGERS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.abs, max, min}
)


def _is_integer(value: Any) -> bool:
    """Return whether a plain number is an integer: a size, or a number that is computed from sizes by such ops."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int)
    if op_of(value).rows:
        return True
    return value.target in _KEEP_INTEGERS and all(_is_integer(argument) for argument in value.args)


def _written(output: _Output, joint: bool, emission: Emission) -> _Output:
    """Return the output with its weights; with `joint`, the mean over replicas is the value for their batches together."""
    if output.number is not None:
        return replace(output, value=emission.number(output.number, Scope.OWN))
    if output.form is not None and joint and output.law in ("sum", "mean"):
        return replace(output, value=emission.write(output.form, Scope.ALL), law="sum")
    if output.form is not None and output.law == "sum" and not is_plain_sum(output.form):
        return replace(output, value=emission.write(output.form, Scope.OWN))
    return output


def _copied(recording: Recording) -> tuple[Recording, dict[str, str]]:
    """Return the recording with a copy of its graph, and the name of the given op for each op of the copy."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in recording.graph.nodes:
        new[node] = graph.node_copy(node, lambda source: new[source])
    for node, made in new.items():
        through = frozenset(new[other] for other in op_of(node).differentiates if other in new)
        set_op(made, replace(op_of(node), differentiates=through))
    return replace(recording, graph=graph), {made.name: node.name for node, made in new.items()}
