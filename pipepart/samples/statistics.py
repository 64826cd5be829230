"""Numbers of the batch that its samples are computed with: `weights / weights.sum()`, `x / x.abs().max()`, `l / len(l)`.

In a micro-batch such a number is another than in the whole batch. If it comes from the batch alone, it is an input of
the graph, like what a loss is divided by. What comes from the network stays as it is: whether samples really meet there
(or whether it is an offset, a capacity, a flag) cannot be told from the graph.
"""

from __future__ import annotations

from contextlib import suppress

import torch.fx as fx

from pipepart.recording.op import op_of
from pipepart.recording.trace import intrinsics
from pipepart.samples.calls import name_of
from pipepart.samples.follow import Following, Unknown
from pipepart.samples.quantities import Quantities, Quantity

__all__ = ["Statistics", "data_checks"]

_ARITHMETIC = frozenset((
    "add", "sub", "rsub", "mul", "div", "rdiv", "pow", "rpow", "clamp", "clip", "maximum", "minimum", "where",
    "masked_fill", "lerp", "addcmul", "addcdiv", "floor_divide", "remainder", "fmod", "eq", "ne", "lt", "le", "gt",
    "ge", "float_power",
))  # fmt: skip
"""Ops that compute with the numbers that they are given; elsewhere, numbers are sizes and positions."""


class Statistics:
    """Where values of samples are computed with a number of their batch."""

    def __init__(self, follow: Following, nodes: list[fx.Node]) -> None:
        self._uses: dict[fx.Node, list[fx.Node]] = {}
        self._above: dict[fx.Node, frozenset[fx.Node]] = {}
        """For each node, the ops at or above it that use such a number."""
        for node in nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            above = {user for source in node.all_input_nodes for user in self._above.get(source, ())}
            found = [source for source in node.all_input_nodes if _is_statistic(node, source, follow)]
            if found:
                self._uses[node] = found
                above.add(node)
            if above:
                self._above[node] = frozenset(above)

    def replaced(self, term: fx.Node, quantities: Quantities) -> dict[tuple[fx.Node, fx.Node], Quantity]:
        """What must be numbers of the whole batch for a term to be right: (op, argument) pairs."""
        found = {}
        for user in sorted(self._above.get(term, ()), key=lambda node: node.name):
            for source in self._uses[user]:
                with suppress(Unknown):
                    found[(user, source)] = quantities.of(source)
        return found


def _is_statistic(node: fx.Node, source: fx.Node, follow: Following) -> bool:
    """Whether `node` is about samples, and `source` is something of their batch that has no samples in it."""
    meta = op_of(node)
    if not follow.depends(source) or source.op == "placeholder" or meta.is_number or meta.shape is None:
        return False
    if node.target in (intrinsics.check, intrinsics.changed) or not _has_samples(node, follow):
        return False
    if op_of(source).is_number:
        return name_of(node) in _ARITHMETIC
    return op_of(source).shape is not None and not _has_samples(source, follow)


def _has_samples(node: fx.Node, follow: Following) -> bool:
    if follow.ragged(node):
        return True
    try:
        return bool(follow.dims(node))
    except Unknown:
        return True


def data_checks(nodes: list[fx.Node], follow: Following) -> list[fx.Node]:
    """Decisions of the model by the contents of the batch alone: they are made for the whole batch, not for parts."""
    found = []
    for node in nodes:
        value = node.args[0] if node.target is intrinsics.check else None
        if isinstance(value, fx.Node) and follow.pure(value) and _reads_data(value):
            found.append(node)
    return found


def _reads_data(value: fx.Node) -> bool:
    todo, seen = [value], set()
    while todo:
        node = todo.pop()
        if node in seen or node.target in ("size", "numel", "stride"):
            continue
        seen.add(node)
        if node.op == "placeholder":
            return not op_of(node).is_number
        todo.extend(node.all_input_nodes)
    return False
