"""Ops that combine samples, found by running a recording on a batch and on its parts, not by a list of ops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx

from pipepart.recording import Recording
from pipepart.recording.fingerprint import target_name
from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.intrinsics import changed
from pipepart.samples.follow import outputs_of, sources_of
from pipepart.samples.laws import UNKNOWN, Law
from pipepart.samples.lockstep import Lockstep, Split, evaluating, run_in_lockstep, with_other_numbers

__all__ = ["Difference", "Fault", "LossPair", "Mixing", "fault_of", "study"]

_SAME_GRADIENT = {True: 1e-6, False: 2e-2}
"""The largest difference of equal gradients, relative to the largest of the parameter; True: in float64."""


@dataclass(frozen=True)
class Fault:
    """An op after which the parts of a batch do not make up the whole any more."""

    target: str
    module: str
    source: str

    def __str__(self) -> str:
        where = f"module {self.module!r}, " if self.module else ""
        return f"{self.target} ({where}{self.source or 'line not known'})"


@dataclass(frozen=True)
class LossPair:
    """The loss of the whole batch, and that of its parts together."""

    whole: float
    parts: float


@dataclass(frozen=True, order=True)
class Difference:
    """The largest difference of gradients, relative to the largest gradient of that parameter."""

    relative: float
    parameter: str


@dataclass(frozen=True)
class Mixing:
    """The comparison of a batch with its parts."""

    laws: Mapping[str, Law]
    """Laws by node name; a law that may hold by chance is unknown."""
    wrong: tuple[int, ...] = ()
    """The flat outputs whose parts do not make up the whole."""
    fault: Fault | None = None
    """The first op on the way to these outputs."""
    loss: LossPair | None = None
    gradient: Difference | None = None
    """The difference with the parameters of the model, or with moved ones if it is larger there."""
    gradient_here: Difference | None = None
    """The difference with the parameters of the model."""
    exact: bool = True
    """Whether all ops ran in float64."""
    differs: Mapping[int, float] = field(default_factory=dict)
    """Differences of wrong outputs relative to the whole; nan for outputs that are not single numbers."""
    fragile: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """For outputs that are right, but only in whole numbers of this batch, which may be chance: the nodes to confirm."""
    lost: frozenset[str] = frozenset()
    """Nodes without a law."""

    @property
    def same_gradients(self) -> bool:
        """Whether the gradients of the parts make up those of the whole."""
        return self.gradient is None or self.gradient.relative <= _SAME_GRADIENT[self.exact]

    @property
    def same(self) -> bool:
        """Whether the parts make up the whole, in all outputs and gradients."""
        return not self.wrong and self.same_gradients


def study(recording: Recording, split: Split, others: Iterable[Split] = ()) -> Mixing:
    """Run a recording on a batch and on its parts, without a change of the model.

    The comparison is made twice: with the parameters of the model, and with moved ones. Values that happen to be equal at
    the start (closed gates, all samples of one kind) differ with moved parameters. Values that moved parameters saturate
    (a sparse attention that becomes one-hot, so that its entropy is zero) differ with those of the model. If the step
    reads numbers (the epoch), a third comparison has other ones: the weight of a term of the loss may be zero at the start.

    Counts over combined samples (hits, flags, places in an order) are whole numbers, which may agree by chance. Such
    outputs must also be right for `others`: other samples of the same batch, each with parameters of its own.
    """
    with evaluating(recording.root):
        found = _study(recording, split)
        with suppress(Exception):  # a model may refuse parameters that are not its own
            moved = _study(recording, split, moved=0)
            if moved.loss is None or math.isfinite(moved.loss.whole + moved.loss.parts):
                found = _both(moved, found)
        if (later := with_other_numbers(recording, split)) is not None:
            with suppress(Exception):  # the number may be an index, of which there is no next one
                moved = _study(recording, later, moved=0)
                if moved.loss is None or math.isfinite(moved.loss.whole + moved.loss.parts):
                    found = _both(moved, found)
        found = _confirmed(recording, found, found)
        for seed, other in enumerate(others if found.fragile else (), 1):
            with suppress(Exception):  # a model may also refuse samples with which it was not recorded
                found = _confirmed(recording, found, _study(recording, other, moved=seed, gradients=False))
        return found


def _confirmed(recording: Recording, found: Mixing, again: Mixing) -> Mixing:
    """Return the result after another run: an output is also wrong if one of its nodes to confirm has no law there."""
    met = {i: nodes & again.lost for i, nodes in found.fragile.items()}
    more = [i for i in found.fragile if i not in found.wrong and (i in again.wrong or met[i])]
    weak = {name for nodes in found.fragile.values() for name in nodes}
    laws = {name: UNKNOWN if name in weak and again.laws.get(name) != law else law for name, law in found.laws.items()}
    if not more:
        return replace(found, laws=laws)
    first = next((node for node in recording.graph.nodes if any(node.name in met[i] for i in more)), None)
    return replace(
        found,
        laws=laws,
        wrong=tuple(sorted({*found.wrong, *more})),
        fault=found.fault or (fault_of(first) if first is not None else again.fault),
        differs={**{i: again.differs.get(i, math.nan) for i in more}, **found.differs},
    )


def _both(moved: Mixing, here: Mixing) -> Mixing:
    """Return the laws that hold with both sets of parameters, and the differences with either of them.

    The sizes of the differences are those with the parameters of the model.
    """
    nothing: frozenset[str] = frozenset()
    return replace(
        moved,
        laws={name: _common(law, moved.laws.get(name, UNKNOWN)) for name, law in here.laws.items()},
        wrong=tuple(sorted({*moved.wrong, *here.wrong})),
        fault=moved.fault or here.fault,
        loss=here.loss,
        gradient=max((g for g in (moved.gradient, here.gradient) if g is not None), default=None),
        gradient_here=here.gradient,
        exact=moved.exact and here.exact,
        differs={**dict.fromkeys(moved.wrong, 0.0), **here.differs},
        fragile={
            i: moved.fragile.get(i, nothing) | here.fragile.get(i, nothing) for i in {**moved.fragile, **here.fragile}
        },
        lost=moved.lost | here.lost,
    )


def _common(here: Law, moved: Law) -> Law:
    """Return the law that holds with both sets of parameters. Equal samples look shared, and so do saturated ones."""
    if here.kind == "shared" and moved.merges:
        return moved
    return here if here == moved or (moved.kind == "shared" and here.merges) else UNKNOWN


def _study(recording: Recording, split: Split, moved: int | None = None, gradients: bool = True) -> Mixing:
    pair = run_in_lockstep(recording, split, moved)
    outputs = outputs_of(recording.graph)
    checked = [i for i, node in enumerate(outputs) if i not in split.free and isinstance(node, fx.Node)]
    wrong = tuple(i for i in checked if not _merges(i, outputs[i], pair))
    loss, gradient = None, None
    if gradients and recording.loss_index is not None:
        loss, gradient = _losses(recording.loss_index, outputs[recording.loss_index], pair)
    return Mixing(
        laws={node.name: UNKNOWN if node in pair.chance else law for node, law in pair.laws.items()},
        wrong=wrong,
        fault=_first_fault(recording, pair.laws, [outputs[i] for i in wrong]),
        loss=loss,
        gradient=gradient,
        gradient_here=gradient,
        exact=pair.exact,
        differs={i: _relative(i, outputs[i], pair) for i in wrong},
        fragile={
            i: frozenset(source.name for source in sources_of([outputs[i]]) & pair.fragile)
            for i in checked
            if i not in wrong and outputs[i] in pair.fragile
        },
        lost=frozenset(node.name for node, law in pair.laws.items() if not law.known),
    )


def _merges(index: int, node: fx.Node, pair: Lockstep) -> bool:
    """Return whether the runtime merges the values of micro-batches into the value of an output for the whole batch."""
    law, value = pair.laws[node], pair.whole.values[node]
    if not isinstance(value, torch.Tensor):
        return law.known
    if index in pair.split.sums:
        return law.kind == "sum" or (law.kind == "shared" and not bool(value.detach().any()))
    if index == pair.recording.loss_index or value.dim() == 0:
        return law.kind in ("mean", "shared") or (law.kind == "sum" and not value.is_floating_point())
    return law.kind in ("shared", "mean") or (law.kind == "batched" and law.dim == 0)


def _losses(index: int, node: fx.Node, pair: Lockstep) -> tuple[LossPair, Difference | None]:
    """Return the loss of the whole and of the parts together, and the difference of their gradients."""
    whole: torch.Tensor = pair.whole.values[node]
    weighted = zip(pair.parts, pair.split.weights(index))
    together = torch.stack([part.values[node].reshape(()) * weight for part, weight in weighted]).sum()
    losses = LossPair(float(whole.detach()), float(together.detach()))
    names = {id(parameter): name for name, parameter in pair.recording.root.named_parameters()}
    trained = [(names.get(key, "?"), p) for key, p in pair.parameters.items() if p.requires_grad]
    if not trained or not whole.requires_grad or not together.requires_grad:
        return losses, None
    tensors = [p for _, p in trained]
    wanted = torch.autograd.grad(whole.reshape(()), tensors, retain_graph=True, allow_unused=True)
    got = torch.autograd.grad(together, tensors, allow_unused=True)
    largest = max((float(g.abs().max()) for g in wanted if g is not None and g.numel()), default=0.0)
    worst = Difference(0.0, trained[0][0])
    for (name, _), a, b in zip(trained, wanted, got):
        if a is None and b is None:
            continue
        a, b = (x if x is not None else torch.zeros_like(y) for x, y in ((a, b), (b, a)))  # type: ignore[arg-type]
        if a.numel():
            scale = max(float(a.abs().max()), float(b.abs().max()), 1e-6 * largest, 1e-300)
            found = Difference(float((a - b).abs().max()) / scale, name)
            worst = found if found.relative > worst.relative else worst
    return losses, worst


def _relative(index: int, node: fx.Node, pair: Lockstep) -> float:
    """Return the difference of a number between the whole and the mean (or sum) of its parts; nan for other values."""
    value = pair.whole.values[node]
    parts = [part.values[node] for part in pair.parts]
    if not all(isinstance(tensor, torch.Tensor) for tensor in (value, *parts)) or value.dim():
        return math.nan
    mean = sum(float(part.detach()) * weight for part, weight in zip(parts, pair.split.weights(index)))
    return abs(mean - float(value.detach())) / max(abs(float(value.detach())), 1e-12)


def _first_fault(recording: Recording, laws: Mapping[fx.Node, Law], outputs: Sequence[fx.Node]) -> Fault | None:
    """Return the first op on the way to these outputs that has no law, while all its arguments have one."""
    on_the_way = sources_of(node for node in outputs if not laws[node].known)
    data: set[fx.Node] = set()
    """Nodes that depend on the samples themselves, not only on their number."""
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            data.add(node)
        elif not op_of(node).is_number or node.target == "item":
            data.update([node] if any(source in data for source in node.all_input_nodes) else [])
        if node not in on_the_way or node not in data or laws[node].known or node.target is changed:
            continue
        if all(laws[source].known for source in node.all_input_nodes if source in data):
            return fault_of(node)
    return fault_of(outputs[0]) if outputs else None


def fault_of(node: fx.Node) -> Fault:
    """Return a node as it is named in messages."""
    if node.op in ("get_attr", "output"):
        return Fault(target_name(node.target), "", "")
    return Fault(target_name(node.target).rpartition(".")[2], op_of(node).module, op_of(node).source)
