"""Heads of a recorded step in slices: one op takes the place of the linear layer, of its scores and of the loss.

```
before   hidden -- linear -- scores -- view -- cross_entropy
after    hidden -------------------- view -- sliced_cross_entropy
```

The views of the scores become the same views of the hidden states. All ops keep their names, so chunks and seeds stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from pipepart.graph import Head, find_heads, is_size, keeps_numbers, sizes_of
from pipepart.recording import OpMeta, Recording
from pipepart.recording.op import op_of, set_op, shape_of
from pipepart.runtime.sliced_loss import sliced_cross_entropy

__all__ = ["with_sliced_heads"]


def with_sliced_heads(recording: Recording, chunk_of: Mapping[str, int], tokens: int) -> Recording:
    """Return a recording whose heads run so many tokens at a time; 0: the recording as it is.

    A head whose ops are in several chunks stays whole: a step that the plan was not made for may divide it.
    """
    if not tokens:
        return recording
    heads = [head for head in find_heads(recording).heads if len({chunk_of.get(node.name) for node in head.ops}) == 1]
    return _Sliced(recording, heads, tokens).made() if heads else recording


class _Sliced:
    """A copy of a graph with heads in slices."""

    def __init__(self, recording: Recording, heads: list[Head], tokens: int) -> None:
        self._recording, self._tokens = recording, tokens
        self._graph = fx.Graph()
        self._new: dict[fx.Node, Any] = {}
        """For each node the copy, or what takes its place: for scores the hidden states, for their size a number."""
        self._linears = {head.linear: head for head in heads}
        self._steps = {step: head for head in heads for step in head.steps}
        self._losses = {head.loss.node: head for head in heads}

    def made(self) -> Recording:
        for node in self._recording.graph.nodes:
            self._take(node)
        self._graph.lint()
        return replace(self._recording, graph=self._graph)

    def _take(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        of_scores = self._linears.get(source) or self._steps.get(source) if isinstance(source, fx.Node) else None
        if node in self._linears:
            self._new[node] = self._new[self._linears[node].hidden]
        elif node in self._steps:
            self._new[node] = self._step(node, self._steps[node])
        elif node in self._losses:
            self._new[node] = self._loss(node, self._losses[node])
        elif of_scores is not None and is_size(node) and self._of_classes(node, of_scores):
            self._new[node] = of_scores.classes
        else:
            made = self._graph.node_copy(node, self._new.__getitem__)
            self._describe(node, made, op_of(node))

    @staticmethod
    def _of_classes(size: fx.Node, head: Head) -> bool:
        scores: Any = size.args[0]
        dim: Any = size.args[1]
        return bool(dim % len(shape_of(scores)) == head.class_dims[scores])

    def _describe(self, node: fx.Node, made: fx.Node, op: OpMeta) -> None:
        through = [self._new[source] for source in op_of(node).differentiates if source in self._new]
        made.name = node.name
        made.meta = dict(node.meta)
        set_op(made, replace(op, differentiates=frozenset(one for one in through if isinstance(one, fx.Node))))
        self._new[node] = made

    def _step(self, node: fx.Node, head: Head) -> fx.Node:
        """Write a view of the hidden states for one of the scores. Conversions and copies are left out."""
        source: Any = node.args[0]
        hidden: fx.Node = self._new[source]
        sizes = sizes_of(node)
        if keeps_numbers(node):
            return hidden
        args: Any = fx.node.map_arg(node.args, self._new.__getitem__)
        kwargs: Any = fx.node.map_arg(dict(node.kwargs), self._new.__getitem__)
        if sizes is not None:
            wanted: Any = fx.node.map_arg(sizes[:-1], self._new.__getitem__)
            args, kwargs = (hidden, (*wanted, head.features)), {}
            made = self._graph.call_method("reshape", args, kwargs)
        else:
            made = self._graph.create_node(node.op, node.target, args, kwargs)
        at, op, beside = head.class_dims[node], op_of(node), op_of(head.hidden)
        shape = list(shape_of(node))
        size = op.output_bytes // max(1, shape[at]) * head.features
        shape[at] = head.features
        rows = tuple((head.features,) * len(row) if dim == at else row for dim, row in enumerate(op.rows))
        described = replace(
            op,
            shape=tuple(shape),
            rows=rows,
            output_bytes=size,
            dtype=beside.dtype,
            reads=beside.writes,
            writes=beside.writes,
        )
        self._describe(node, made, described)
        return made

    def _loss(self, node: fx.Node, head: Head) -> fx.Node:
        call, scores = head.loss, head.loss.get("input")
        weight = call.get("weight")
        if isinstance(weight, torch.Tensor):
            weight = f"{call.path}.weight"
        arguments = (
            self._new[scores],
            self._parameter(node, head.weight),
            self._parameter(node, head.bias),
            self._new[call.get("target")],
            self._parameter(node, weight),
        )
        settings = {
            "tokens": self._tokens,
            "ignore_index": call.get("ignore_index", -100),
            "reduction": call.reduction,
            "label_smoothing": call.get("label_smoothing", 0.0),
            "casts": head.casts,
        }
        made = self._graph.call_function(sliced_cross_entropy, arguments, settings)
        self._describe(node, made, op_of(node))
        return made

    def _parameter(self, node: fx.Node, found: fx.Node | str | None) -> fx.Node | None:
        """Return the read of a parameter or a buffer."""
        if not isinstance(found, str):
            return None if found is None else self._new[found]
        made = self._graph.create_node("get_attr", found, (), {}, f"{node.name}_reads")
        set_op(made, OpMeta())
        return made
