"""Numbers that come from the batch alone (counts of targets, sums of masks), computed before the step for the whole batch.

They are computed in two parts: what adds up over batches (sums, counts, sizes), and what is done with the sum (a clamp,
a product with a constant). Between the two, the sums of several replicas are added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording import Recording
from pipepart.recording.execution.emit import executable
from pipepart.recording.execution.ops_run import used_tensors
from pipepart.recording.op import op_of, set_op, shape_of
from pipepart.recording.trace.intrinsics import check
from pipepart.samples.calls import dims_of, name_of
from pipepart.samples.follow import Following, Unknown

__all__ = ["BATCHES", "SAMPLES", "Quantities", "Quantity", "Totals", "count_targets"]

BATCHES = "batches"
SAMPLES = "samples"
"""The key of the number of samples, or anything proportional to it."""

Totals = Callable[[Sequence[float]], list[float]]
"""Adds numbers over replicas."""


@dataclass(frozen=True)
class Quantity:
    """A number of the whole batch: the value of `node` there."""

    name: str
    key: str
    """The same for numbers that are always equal, or (the number of samples) always proportional."""
    node: fx.Node


def count_targets(target: torch.Tensor, ignore_index: int, weight: torch.Tensor | None) -> torch.Tensor:
    """What `cross_entropy` and `nll_loss` divide by: the weights of all targets that are not ignored."""
    used = target != ignore_index
    if weight is None:
        return used.sum()
    return weight[target.masked_select(used)].sum()


count_targets.adds_up = True  # type: ignore[attr-defined]


@dataclass
class Quantities:
    """All quantities of a recording, in the order in which they were found."""

    recording: Recording
    follow: Following
    found: dict[str, Quantity] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """For each op that was added, the one that it was written beside."""
    checks: list[tuple[fx.Node, Any, str]] = field(default_factory=list)
    """Values of the whole batch that must be what they were when the model was recorded."""

    def of(self, node: fx.Node) -> Quantity:
        """The value of a node for the whole batch. Sizes along the batch are the number of samples, times a constant."""
        if not self.follow.pure(node):
            raise Unknown(node, "it is needed for the whole batch, and not made from the batch alone")
        meta = op_of(node)
        if not meta.is_number and meta.shape != ():
            raise Unknown(node, "it is no single number")
        key = SAMPLES if meta.is_number and self.follow.counts_samples(node) else _text(node)
        return self.found.setdefault(node.name, Quantity(node.name, key, node))

    def count(self, near: fx.Node, function: Any, args: tuple[Any, ...]) -> Quantity:
        """The value of ``function(*args)`` for the whole batch, an op of our own that is written beside `near`."""
        shaped = [_flat(arg) for arg in args] if function is count_targets else args
        key = f"{getattr(function, '__name__', function)}({', '.join(_text(arg) for arg in shaped)})"
        for arg in args:
            if isinstance(arg, fx.Node) and not self.follow.pure(arg):
                raise Unknown(arg, "what the loss divides by depends on it, and it is not made from the batch alone")
        if key not in self.found:
            graph = self.recording.graph
            with graph.inserting_after(near) if near in args else graph.inserting_before(near):
                method = isinstance(function, str)
                node = graph.call_method(function, args) if method else graph.call_function(function, args)
            set_op(node, op_of(near).beside(shape=(), output_bytes=8, replicable=True))
            self.origins[node.name] = near.name
            self.found[key] = Quantity(key, key, node)
        return self.found[key]


_CASTS = ("to", "float", "double", "half", "bfloat16", "long", "int", "type_as", "clone", "detach", "contiguous")


def _flat(value: Any) -> Any:
    """A tensor before it got its shape: the count of all targets in it does not depend on that."""
    while isinstance(value, fx.Node) and name_of(value) in ("flatten", "view", "reshape", "contiguous"):
        value = value.args[0]
    return value


def _text(value: Any) -> str:
    """The ops that a value comes from as a text, without changes of type: equal texts are equal numbers."""
    if not isinstance(value, fx.Node):
        return repr(value)
    if value.op in ("placeholder", "get_attr"):
        return str(value.target)
    name = name_of(value)
    if name in _CASTS and isinstance(value.args[0], fx.Node):
        return _text(value.args[0])
    inner = [_text(arg) for arg in (*value.args, *value.kwargs.values()) if not isinstance(arg, torch.dtype)]
    return f"{name or value.name}({', '.join(inner)})"


class Evaluation:
    """Computes all quantities of a batch."""

    def __init__(self, quantities: Quantities, names: Collection[str]) -> None:
        self._follow = quantities.follow
        recording = quantities.recording
        self.quantities = {name: quantity for name, quantity in quantities.found.items() if name in names}
        wanted = [quantity.node for quantity in self.quantities.values()]
        self._checks = list(quantities.checks)
        self.apart: list[fx.Node] = []
        """Quantities that are no function of sums: they are those of a replica, never of all of them."""
        self._parts: dict[fx.Node, str] = {}
        after: dict[fx.Node, None] = {}
        for node in wanted:
            parts, rest = self._divide(node)
            self._parts.update(parts)
            after.update(dict.fromkeys(rest))
        order = {node: i for i, node in enumerate(recording.graph.nodes)}
        inputs = [node for node in order if node.op == "placeholder"][: len(recording.inputs)]
        checked = [node for node, _, _ in self._checks]
        body = _closure([*self._parts, *checked], set())
        self._changes = any(op_of(node).inplace for node in body if node.op not in ("placeholder", "get_attr"))
        nodes = sorted((n for n in body if n.op not in ("placeholder", "get_attr")), key=order.__getitem__)
        self._before = executable(recording, nodes, inputs, [*self._parts, *checked], depth=None)
        later = _closure(after, set(self._parts)) - set(self._parts)
        rest = sorted((n for n in later if n.op not in ("placeholder", "get_attr")), key=order.__getitem__)
        self._after = executable(recording, rest, list(self._parts), wanted, depth=None)
        self.buffers = used_tensors(recording, [*nodes, *rest])
        """The names of the buffers that are read."""

    def _divide(self, node: fx.Node) -> tuple[dict[fx.Node, str], list[fx.Node]]:
        """The parts of a number that add up, and the ops on these."""
        try:
            return self._parts_of(node)
        except Unknown:
            self.apart.append(node)
            return {node: "apart"}, []

    def _parts_of(self, node: fx.Node) -> tuple[dict[fx.Node, str], list[fx.Node]]:
        law = self._adds_up(node)
        if law:
            return {node: law}, []
        parts: dict[fx.Node, str] = {}
        rest = [node]
        for source in node.all_input_nodes:
            if not self._follow.depends(source):
                if any(part.op == "placeholder" for part in _closure([source], set())):
                    parts[source] = "apart"  # another size of the batch than its samples, the same for every part
                continue
            if source.op == "placeholder" or not _is_single(source):
                raise Unknown(source, "it does not add up over batches")
            more, ops = self._parts_of(source)
            parts.update(more)
            rest += ops
        return parts, rest

    def _adds_up(self, node: fx.Node) -> str | None:
        name = name_of(node)
        if getattr(node.target, "adds_up", False) or (op_of(node).is_number and self._follow.counts_samples(node)):
            return "sum"
        if name not in ("sum", "count_nonzero", "mean", "numel") or not isinstance(node.args[0], fx.Node):
            return None
        source = node.args[0]
        if not self._follow.ragged(source):
            try:
                dims = self._follow.dims(source)
            except Unknown:
                return None
            shape = shape_of(source)
            over = tuple(range(len(shape))) if name == "numel" else dims_of(node, len(shape))
            if len(dims) != 1 or over is None or dims[0] not in over:
                return None
        elif name == "mean":
            return None
        return "mean" if name == "mean" else "sum"

    def __call__(
        self, leaves: Sequence[Any], samples: int, totals: Totals | None = None
    ) -> tuple[dict[str, float], dict[str, float], int]:
        """The quantities of this batch, those of all replicas together, and the number of samples of all of them.

        Without `totals` there is one replica. All replicas must call it together if there are more.
        """
        parts = self.parts(leaves)
        own = self._values(parts)
        if totals is None:
            return own, own, samples
        counts = self.counts(parts, samples)
        *sums, everyone = totals([*counts.values(), float(samples)])
        return own, self.together(parts, dict(zip(counts, sums)), int(everyone)), int(everyone)

    @torch.no_grad()
    def parts(self, leaves: Sequence[Any], checked: bool = True) -> list[Any]:
        """The parts of all quantities for one batch. With `checked`, decisions by its contents must be as recorded."""
        given = [leaf.clone() if self._changes and isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        parts = list(self._before(*given))
        if checked:
            for value, (_, expected, text) in zip(parts[len(self._parts) :], self._checks):
                check(value, expected, text)
        return parts[: len(self._parts)]

    def counts(self, parts: Sequence[Any], samples: int) -> dict[str, float]:
        """What adds up over batches and replicas, by the ops that it comes from: the same in every recording of a step."""
        weights = {"sum": 1, "mean": samples}
        return {
            _text(node): float(part) * weights[law]
            for part, (node, law) in zip(parts, self._parts.items())
            if law in weights
        }

    def together(self, parts: Sequence[Any], sums: Mapping[str, float], samples: int) -> dict[str, float]:
        """The quantities of several batches, from their counts added up and their number of samples."""
        found = []
        for part, (node, law) in zip(parts, self._parts.items()):
            if law != "apart":
                value = sums[_text(node)]
                part = _like(part, value / samples if law == "mean" else value)
            found.append(part)
        return self._values(found)

    @torch.no_grad()
    def _values(self, parts: Sequence[Any]) -> dict[str, float]:
        return {name: float(value) for name, value in zip(self.quantities, self._after(*parts))}


def _is_single(node: fx.Node) -> bool:
    meta = op_of(node)
    return bool(meta.is_number or meta.shape == ())


def _like(part: Any, value: float) -> Any:
    if isinstance(part, torch.Tensor):
        return torch.tensor(value, dtype=part.dtype, device=part.device)
    return type(part)(value)


def _closure(nodes: Iterable[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
    """All nodes that these are computed from, up to `stop`."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found and node not in stop:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found
