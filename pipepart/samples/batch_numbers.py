"""Numbers of a batch, computed before its step on the first stage: the values of the inputs that `weigh` adds.

A quantity is computed in two parts: values that add up over batches (sums, counts, sizes), and ops on these sums (a clamp,
a product with a constant). Between the two, the values of several batches are added: of all replicas, or of a window.

A loss whose terms have different denominators (`mlm / tokens + nsp / pairs`) needs the numbers of the whole window before
its first backward. They come from the batches alone, so they are known as soon as the batches are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx as fx

from pipepart.devices import on_host
from pipepart.recording.execution.emit import executable
from pipepart.recording.execution.ops_run import used_tensors
from pipepart.recording.op import op_of, shape_of
from pipepart.recording.recorded_run.intrinsics import check
from pipepart.samples.emission import BATCHES, NumberInput, Scope
from pipepart.samples.follow import Following, Unknown, dims_of, name_of, sources_of
from pipepart.samples.forms import Denominator
from pipepart.samples.quantities import SAMPLES, Quantities, text_of

__all__ = [
    "DIFFERENT_RECORDINGS",
    "NOT_KNOWN_AHEAD",
    "BatchNumbers",
    "EqualWeights",
    "Numbers",
    "Totals",
    "Window",
    "open_window",
]

_ROUNDING = 1e-6

_EQUAL_WEIGHTS = "each batch is exact, and their gradients are averaged with equal weights, as on one device"
NOT_KNOWN_AHEAD = (
    "the loss has terms with different denominators, and the batches that are accumulated with a batch are not known when "
    f"it is trained on: {_EQUAL_WEIGHTS}"
)
DIFFERENT_RECORDINGS = (
    "the loss has terms with different denominators, and batches that are accumulated together need different recordings of "
    f"the step (another structure, type or Python state): {_EQUAL_WEIGHTS}"
)

Totals = Callable[[Sequence[float]], list[float]]
"""Adds numbers over replicas; all replicas must call it together."""


class EqualWeights(UserWarning):
    """Accumulated batches are averaged with equal weights, where one process on all of them would weight their terms."""


@dataclass(frozen=True)
class BatchNumbers:
    """The numbers of one batch."""

    inputs: Mapping[str, float | tuple[float, ...]]
    """Values of the added inputs by name; a tuple has one number for each micro-batch."""
    samples: int
    """Samples of this batch in all replicas."""
    denominator: float | None
    """The denominator of all terms of the loss, if they share one."""
    batches: int | None = None
    """The number of batches in the window whose numbers are in `inputs`; None if there is no window."""


@dataclass(frozen=True)
class Window:
    """The numbers of all batches of a window, in all replicas."""

    batches: int
    sums: Mapping[str, float]
    """Counts of all batches together, by the ops from which they are computed."""
    samples: int
    expected: tuple[Mapping[str, float], ...]
    """The counts of each batch of this replica."""

    def expects(self, position: int, counts: Mapping[str, float]) -> bool:
        """Return whether the batch at `position` has the counts with which the sums were made."""
        if position >= self.batches or not counts.keys() <= self.expected[position].keys():
            return False
        known = self.expected[position]
        return all(abs(known[key] - value) <= _ROUNDING * abs(value) for key, value in counts.items())


def open_window(counts: Sequence[Mapping[str, float] | None], totals: Totals | None) -> Window | None:
    """Return the window of batches with these counts; None if counts are unknown, here or in another replica."""
    known = [own for own in counts if own is not None]
    complete = len(known) == len(counts)
    keys = list(counts[0] or ())
    sums = [sum(own[key] for own in known) for key in keys]
    if totals is not None:
        *sums, missing = totals([*sums, float(not complete)])
        complete = not missing
    if not complete:
        return None
    together = dict(zip(keys, sums))
    return Window(len(counts), together, int(together.pop(SAMPLES)), tuple(known))


class Numbers:
    """Computes the numbers of a batch."""

    def __init__(
        self, quantities: Quantities, inputs: Mapping[str, NumberInput], denominator: Denominator | None, replicas: int
    ) -> None:
        self.inputs, self._denominator, self._replicas = inputs, denominator, replicas
        recording = quantities.recording
        used = {number.key for number in inputs.values()}
        self.quantities = {name: quantity for name, quantity in quantities.found.items() if name in used}
        self.checks = tuple(quantities.checks)
        self._parts: dict[fx.Node, str] = {}
        """Values from which the quantities are computed, with their laws over batches: "sum", "mean", or "apart" for a
        value of one replica that is not combined with those of other batches."""
        wanted = [quantity.node for quantity in self.quantities.values()]
        for node in wanted:
            try:
                self._parts.update(_summands(node, quantities.follow))
            except Unknown:
                self._parts[node] = "apart"
        first = [*self._parts, *(item.node for item in self.checks)]
        order = list(recording.graph.nodes)
        leaves = [node for node in order if node.op == "placeholder"][: len(recording.inputs)]
        ops = _ops(order, sources_of(first))
        later = _ops(order, sources_of(wanted, self._parts.__contains__))
        self._changes = any(op_of(node).inplace for node in ops)
        self._before: Callable[..., Sequence[Any]] = _nothing
        self._after: Callable[..., Sequence[Any]] = _nothing
        if first:
            self._before = executable(recording, ops, leaves, first, depth=None)
            self._after = executable(recording, later, list(self._parts), wanted, depth=None)
        self.buffers = used_tensors(recording, [*ops, *later])
        """The names of the buffers that are read."""

    @property
    def reads_batch(self) -> bool:
        """Whether values of the batch are read by the host."""
        return bool(self._parts or self.checks)

    @property
    def divides_by_sum(self) -> bool:
        """Whether all terms of the loss are divided by one number that adds up over batches: their samples, or a count."""
        if self._denominator is None or len(self._denominator) != 1:
            return False
        key, power = self._denominator[0]
        counts = {quantity.key for quantity in self.quantities.values() if self._parts.get(quantity.node) == "sum"}
        return power == -1 and key in {SAMPLES, *counts}

    def __call__(
        self,
        leaves: Sequence[Any],
        sizes: Sequence[int],
        totals: Totals | None = None,
        window: Window | None = None,
        position: int = 0,
    ) -> BatchNumbers:
        """Return the numbers of a batch that is split into micro-batches of these sizes.

        With several replicas whose numbers are needed together, `totals` adds them. With a `window`, the batch is the one
        at `position` there.
        """
        samples = sum(sizes)
        parts = self._parts_in(leaves)
        own = every = wide = self._values(parts)
        everyone = samples
        if totals is not None:
            counts = self._counts(parts, samples)
            *sums, total = totals([*counts.values(), float(samples)])
            everyone = int(total)
            every = wide = self._together(parts, dict(zip(counts, sums)), everyone)
        widest, batches = everyone, None
        if window is not None and self._as_expected(leaves, samples, window, position):
            widest, batches = window.samples, window.batches
            wide = self._together(parts, window.sums, widest)
        values = {Scope.OWN: own, Scope.ALL: every, Scope.WINDOW: wide}
        shares = {
            Scope.OWN: 1 / samples,
            Scope.ALL: self._replicas / everyone,
            Scope.WINDOW: self._replicas / widest,
            Scope.EACH: 1 / samples / (batches or 1),
        }
        inputs: dict[str, float | tuple[float, ...]] = {}
        for name, number in self.inputs.items():
            if number.key == SAMPLES:
                inputs[name] = tuple(size * shares[number.scope] for size in sizes)
            elif number.key == BATCHES:
                inputs[name] = self._replicas / (batches or 1)
            else:
                inputs[name] = values[number.scope][number.key]
        return BatchNumbers(inputs, everyone, self._value_of_denominator(every, everyone), batches)

    def counts(self, leaves: Sequence[Any], samples: int) -> dict[str, float]:
        """Return the numbers of a batch of this replica that add up over batches, and its number of samples."""
        return {**self._counts(self._parts_in(leaves, checked=False), samples), SAMPLES: float(samples)}

    def _as_expected(self, leaves: Sequence[Any], samples: int, window: Window, position: int) -> bool:
        """Return whether a batch still has the counts with which the window was opened; warns if not."""
        if window.expects(position, self.counts(leaves, samples)):
            return True
        warnings.warn(
            f"batch {position + 1} of {window.batches} accumulated batches has changed since the first of them was trained "
            "on (by a hook, or the step was recorded again). It is divided by its own numbers and weighted like one of "
            "equal batches.",
            EqualWeights,
            stacklevel=2,
        )
        return False

    def _value_of_denominator(self, every: Mapping[str, float], samples: int) -> float | None:
        if self._denominator is None:
            return None
        values = {quantity.key: every[name] for name, quantity in self.quantities.items()}
        values[SAMPLES] = float(samples)
        product = 1.0
        for key, power in self._denominator:
            product *= values[key] ** -power if values[key] else 0.0
        return product

    @torch.no_grad()
    def _parts_in(self, leaves: Sequence[Any], checked: bool = True) -> list[Any]:
        """Return the parts of all quantities for one batch. With `checked`, branches on its contents must be as recorded."""
        given = [leaf.clone() if self._changes and isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        values = list(self._before(*given))
        if checked:
            for value, item in zip(values[len(self._parts) :], self.checks):
                check(value, item.expected, item.text)
        return on_host(values[: len(self._parts)])  # all of them at once, if they are on an accelerator

    def _counts(self, parts: Sequence[Any], samples: int) -> dict[str, float]:
        """Return the parts that add up over batches, by the ops that compute them: equal in all recordings of a step."""
        weights = {"sum": 1, "mean": samples}
        return {
            text_of(node): float(part) * weights[law]
            for part, (node, law) in zip(parts, self._parts.items())
            if law in weights
        }

    def _together(self, parts: Sequence[Any], sums: Mapping[str, float], samples: int) -> dict[str, float]:
        """Return the quantities of several batches, from the sums of their counts and their number of samples."""
        found = []
        for part, (node, law) in zip(parts, self._parts.items()):
            if law != "apart":
                value = sums[text_of(node)] / (samples if law == "mean" else 1)
                like = isinstance(part, torch.Tensor)
                part = torch.full_like(part, value) if like else type(part)(value)
            found.append(part)
        return self._values(found)

    @torch.no_grad()
    def _values(self, parts: Sequence[Any]) -> dict[str, float]:
        return {name: float(value) for name, value in zip(self.quantities, self._after(*parts))}


def _nothing(*values: Any) -> tuple[Any, ...]:
    """Return no values: there are no quantities."""
    return ()


def _ops(order: Sequence[fx.Node], nodes: set[fx.Node]) -> list[fx.Node]:
    return [node for node in order if node in nodes and node.op not in ("placeholder", "get_attr")]


def _summands(node: fx.Node, follow: Following) -> dict[fx.Node, str]:
    """Return the parts of a quantity with their laws. Raises `Unknown` if it is not a function of values that add up."""
    law = _law_over_batches(node, follow)
    if law is not None:
        return {node: law}
    parts: dict[fx.Node, str] = {}
    for source in node.all_input_nodes:
        if not follow.depends(source):
            if any(origin.op == "placeholder" for origin in sources_of([source])):
                parts[source] = "apart"  # a size of the batch other than its samples, equal for every part
            continue
        if source.op == "placeholder" or not _is_one_number(source, follow):
            raise Unknown(source, "it does not add up over batches")
        parts.update(_summands(source, follow))
    return parts


def _is_one_number(node: fx.Node, follow: Following) -> bool:
    """Whether a value is a number, or a tensor with one element at every number of samples."""
    meta = op_of(node)
    return meta.is_number or (meta.shape is not None and prod(meta.shape) == 1 and not follow.dims(node))


def _law_over_batches(node: fx.Node, follow: Following) -> str | None:
    """Return the law of a number that adds up over batches: "sum" or "mean"; None for other numbers."""
    name = name_of(node)
    if getattr(node.target, "adds_up", False) or (op_of(node).is_number and follow.counts_samples(node)):
        return "sum"
    if name not in ("sum", "count_nonzero", "mean", "numel") or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if not follow.ragged(source):
        try:
            dims = follow.dims(source)
        except Unknown:
            return None
        shape = shape_of(source)
        over = tuple(range(len(shape))) if name == "numel" else dims_of(node, len(shape))
        if len(dims) != 1 or over is None or dims[0] not in over:
            return None
    elif name == "mean":
        return None
    return "mean" if name == "mean" else "sum"
