"""Write the weights of the whole batch into a recording: its loss and logs become sums over micro-batches.

A micro-batch that divides by its own number of tokens counts each of its tokens differently from the others. So each
term of a loss is computed as a sum, and divided by a number of the whole batch, which is an input of the graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording import Input, Recording
from pipepart.recording.op import op_of, set_op
from pipepart.samples.emission import ALL, EACH, OWN, WINDOW, Emission
from pipepart.samples.follow import Following, Unknown
from pipepart.samples.forms import Form, Monomial, Ratio, Share, Sum, is_plain_sum, law_of, monomials, parts_of
from pipepart.samples.quantities import BATCHES, SAMPLES, Evaluation, Quantities, Quantity, Totals
from pipepart.samples.statistics import Statistics, data_checks
from pipepart.samples.terms import Terms
from pipepart.samples.window import CountsAlike, Window

_HOST = torch.device("cpu")

Swaps = dict[tuple[fx.Node, fx.Node], Quantity]
"""(op, argument): the number of the whole batch that the op gets instead."""

__all__ = ["BatchNumbers", "Weighed", "unweighed", "weigh"]


@dataclass(frozen=True)
class BatchNumbers:
    """The numbers of one batch: values of the inputs that `weigh` has added, and what its loss is divided by."""

    inputs: Mapping[str, float | tuple[float, ...]]
    """By input name; a tuple has one number for each micro-batch."""
    samples: int
    """Samples of this batch in all replicas."""
    denominator: float | None
    """What all terms of the loss are divided by, if that is one number."""
    batches: int | None = None
    """The accumulated batches whose numbers together are in `inputs`."""


@dataclass(frozen=True, eq=False)
class Weighed:
    """A recording whose outputs of micro-batches can be put together to those of the whole batch."""

    recording: Recording
    """With more inputs (after those of `inputs`), and perhaps with the root of the gradients as one more output."""
    laws: tuple[str, ...]
    """For each output, how values of micro-batches make up that of the batch: "sum", "mean" (by samples), "batch" (one
    after the other along dim 0), "constant", or "unknown" (merged as a mean, which may be wrong)."""
    reasons: Mapping[int, str]
    """For outputs that are unknown: where the walk stopped."""
    divisor: Monomial | None
    """What the loss is divided by; None if it is unknown or its terms are divided by different numbers."""
    origins: Mapping[str, str]
    """The op of the given recording that each op comes from or stands for, by name."""
    together: bool
    """Whether numbers of all replicas together are needed to train."""
    together_always: bool
    """Whether they are needed without training, too (values that are averaged over replicas)."""
    evaluation: Evaluation | None
    names: Mapping[str, tuple[str, str]]
    """Inputs that were added: whose number it is ("own", "all") and which."""
    replicas: int
    wide: bool = False
    """The root of the gradients is divided by numbers of all batches of a `Window`, if there is one."""
    notes: tuple[str, ...] = ()
    """Where accumulated batches cannot be exact together, whatever is known of them."""

    def chunk_of(self, given: Mapping[str, int]) -> dict[str, int]:
        """The chunks of the ops, from those of the given recording."""
        return {new: given[old] for new, old in self.origins.items() if old in given}

    @property
    def buffers(self) -> list[str]:
        """The names of the buffers that the numbers of a batch are computed with, on the first stage."""
        return list(self.evaluation.buffers) if self.evaluation is not None else []

    def numbers(
        self,
        leaves: Sequence[Any],
        sizes: Sequence[int],
        totals: Totals | None = None,
        window: Window | None = None,
        position: int = 0,
    ) -> BatchNumbers:
        """The numbers for a batch that is cut into micro-batches of these sizes.

        `totals` adds numbers over replicas; all of them must call it together. `window`: the batches that are accumulated
        for one step of the optimizer; this one is at `position` there.
        """
        samples = sum(sizes)
        own: dict[str, float] = {}
        every, everyone = own, samples
        if self.evaluation is not None:
            own, every, everyone = self.evaluation(leaves, samples, totals)
        elif totals is not None:
            everyone = int(totals([float(samples)])[0])
        if window is not None and not self._as_expected(leaves, samples, window, position):
            window = None
        wide, widest = every, everyone
        if window is not None:
            widest = window.samples
            if self.evaluation is not None:
                wide = self.evaluation.together(self.evaluation.parts(leaves), window.sums, widest)
        batches = window.batches if window is not None else 1
        values = {OWN: own, ALL: every, WINDOW: wide}
        shares = {
            OWN: 1 / samples, ALL: self.replicas / everyone, WINDOW: self.replicas / widest, EACH: 1 / samples / batches,
        }  # fmt: skip
        inputs: dict[str, float | tuple[float, ...]] = {}
        for name, (whose, key) in self.names.items():
            if key == SAMPLES:
                inputs[name] = tuple(size * shares[whose] for size in sizes)
            elif key == BATCHES:
                inputs[name] = self.replicas / batches
            else:
                inputs[name] = values[whose][key]
        denominator = self._denominator(every, everyone)
        return BatchNumbers(inputs, everyone, denominator, batches if window is not None else None)

    def counts(self, leaves: Sequence[Any], samples: int) -> dict[str, float]:
        """The numbers of a batch of this replica that add up over batches, and its samples."""
        found: dict[str, float] = {}
        if self.evaluation is not None:
            found = self.evaluation.counts(self.evaluation.parts(leaves, checked=False), samples)
        return {**found, SAMPLES: float(samples)}

    def _as_expected(self, leaves: Sequence[Any], samples: int, window: Window, position: int) -> bool:
        """Whether a batch is what was said of it when the window began; if not, the user is told."""
        if window.expects(position, self.counts(leaves, samples)):
            return True
        warnings.warn(
            f"batch {position + 1} of {window.batches} accumulated batches is not what it was when the first of them was "
            "trained on (a hook changed it, or the step was recorded anew in between): it is divided by its own numbers, "
            "and counts like one of equal batches.",
            CountsAlike,
            stacklevel=2,
        )
        return False

    def _denominator(self, every: Mapping[str, float], samples: int) -> float | None:
        if self.divisor is None:
            return None
        values = {SAMPLES: float(samples)}
        if self.evaluation is not None:
            values.update({quantity.key: every[name] for name, quantity in self.evaluation.quantities.items()})
            values[SAMPLES] = float(samples)
        product = 1.0
        for key, power in self.divisor:
            product *= values[key] ** -power if values[key] else 0.0
        return product


def unweighed(recording: Recording) -> Weighed:
    """As it is: each micro-batch divides by its own numbers and counts by its share of samples."""
    count = len(_outputs(recording.graph))
    names = {node.name: node.name for node in recording.ops}
    return Weighed(recording, ("unknown",) * count, {}, None, names, False, False, None, {}, 1)


def weigh(
    recording: Recording,
    replicas: int = 1,
    averaged: Collection[int] = (),
    device: torch.device = _HOST,
    untouched: Collection[int] = (),
    accumulates: bool = False,
) -> Weighed:
    """Find the terms of the loss and of all other outputs, and write their weights into a copy of the graph.

    `averaged`: outputs that are averaged over replicas later. They get values whose mean is that of the whole batch of
    all replicas; other outputs are those of the batch of this replica. `untouched`: outputs that stay as they are.
    `accumulates`: batches may be accumulated, and a loss whose terms are divided by different numbers gets a root of its
    own, which can be divided by the numbers of all of them.
    """
    copy, origins = _copied(recording)
    follow = Following(copy)
    if not follow.known:
        return unweighed(recording)
    nodes = list(copy.graph.nodes)
    quantities = Quantities(copy, follow)
    statistics = Statistics(follow, nodes)
    terms = Terms(copy, follow, quantities)
    outputs = _outputs(copy.graph)
    laws: list[str] = []
    forms: dict[int, Form] = {}
    swaps: dict[int, Swaps] = {}
    reasons: dict[int, str] = {}
    for index, value in enumerate(outputs):
        try:
            if index in untouched and isinstance(value, fx.Node):
                raise Unknown(value, "it is put together otherwise")
            law, form = _law(value, terms, follow)
            if form is not None:
                swaps[index] = _swaps(form, statistics, quantities)
                forms[index] = form
        except Unknown as unknown:
            law, reasons[index] = "unknown", str(unknown)
        laws.append(law)
    emission = Emission(copy.graph, replicas, device)
    loss = recording.loss_index
    several = replicas > 1
    trained = loss in forms and recording.training and laws[loss] in ("sum", "mean")
    divided = monomials(forms[loss]) if loss in forms else set()
    swapped = loss is not None and bool(swaps.get(loss))
    wide = accumulates and trained and len(divided) > 1 and not swapped
    rooted = trained and (several or wide)
    together = {index for index in forms if several and (index in averaged or (rooted and swaps[index]))}
    made = list(outputs)
    for index, form in forms.items():
        if index in together and laws[index] in ("sum", "mean"):
            made[index], laws[index] = emission.write(form, ALL), "sum"
        elif laws[index] == "sum" and not is_plain_sum(form):
            made[index] = emission.write(form, OWN)
    root = loss
    if rooted and loss is not None:
        root = len(made)
        made.append(emission.write(forms[loss], WINDOW if wide else ALL))
        laws.append("sum")
    for (user, source), quantity in {pair: q for swap in swaps.values() for pair, q in swap.items()}.items():
        emission.put(user, source, quantity, ALL if together or rooted else OWN)
    for node in data_checks(nodes, follow):
        quantities.checks.append((node.args[0], node.args[1], str(node.args[2])))  # type: ignore[arg-type]
        copy.graph.erase_node(node)
    evaluation = _evaluation(quantities, emission)
    emission.finish(made, [one for form in forms.values() for one in parts_of(form)])
    added = {**quantities.origins, **emission.origins}
    origins.update({new: origins[old] for new, old in added.items()})
    return Weighed(
        replace(copy, loss_index=root, inputs=(*copy.inputs, *(Input(n, n, "number") for n in emission.names))),
        tuple(laws),
        reasons,
        next(iter(divided)) if len(divided) == 1 else None,
        origins,
        rooted and several,
        (bool(together) and not rooted) or bool(set(averaged) & together),
        evaluation,
        emission.names,
        replicas,
        wide,
        _notes(swapped),
    )


def _law(value: Any, terms: Terms, follow: Following) -> tuple[str, Form | None]:
    if not isinstance(value, fx.Node):
        return "constant", None
    if value.op != "get_attr" and not follow.depends(value):
        return "constant", None
    if value.op == "get_attr":
        return "constant", None
    meta = op_of(value)
    if meta.is_number or meta.shape is None:
        raise Unknown(value, "it is no tensor")
    if follow.ragged(value):
        raise Unknown(value, "its shape depends on the contents of the batch")
    if follow.dims(value):
        if follow.dims(value) == (0,):
            return "batch", None
        raise Unknown(value, "its samples are not in dimension 0")
    form = terms.form(value)
    return law_of(form), form


def _notes(swapped: bool) -> tuple[str, ...]:
    if not swapped:
        return ()
    return (
        "samples are computed with a number of their batch (such as w / w.sum()): each batch is exact, and with "
        "accumulated batches that number is the one of each batch, as on one device",
    )


def _swaps(form: Form, statistics: Statistics, quantities: Quantities) -> Swaps:
    """The numbers of the batch that the samples under the terms of a form are computed with."""
    found: Swaps = {}
    for one in parts_of(form):
        if isinstance(one, (Sum, Share, Ratio)):
            found.update(statistics.replaced(one.node, quantities))
    return found


def _evaluation(quantities: Quantities, emission: Emission) -> Evaluation | None:
    used = {key for _, key in emission.names.values()} - {SAMPLES, BATCHES}
    return Evaluation(quantities, used) if used or quantities.checks else None


def _outputs(graph: fx.Graph) -> list[Any]:
    output: fx.Node = next(reversed(graph.nodes))
    results: Any = output.args[0]
    return list(results)


def _copied(recording: Recording) -> tuple[Recording, dict[str, str]]:
    """The recording over a copy of its graph, and the names of the ops there by those in the copy."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in recording.graph.nodes:
        new[node] = graph.node_copy(node, lambda source: new[source])
    for node, made in new.items():
        through = frozenset(new[other] for other in op_of(node).differentiates if other in new)
        set_op(made, replace(op_of(node), differentiates=through))
    return replace(recording, graph=graph), {made.name: node.name for node, made in new.items()}
