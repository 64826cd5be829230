"""Which ops make samples meet: seen by running a recording on a batch and on its parts, not from a list of ops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx
from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.fingerprint import target_name
from pipepart.recording.op import op_of
from pipepart.recording.trace.intrinsics import changed, set_attribute
from pipepart.samples.laws import UNKNOWN, Law
from pipepart.samples.lockstep import Lockstep, evaluating

__all__ = ["Fault", "Mixing", "Parts", "assigned_path", "fault_of", "persistent_writes", "sources_of", "study"]

_SAME_GRADIENT = {True: 1e-6, False: 2e-2}
"""By whether it ran in float64: how far gradients may be apart, relative to the largest of the parameter."""


@dataclass(frozen=True)
class Fault:
    """An op after which the parts of a batch do not make up the whole any more."""

    op: str
    target: str
    module: str
    source: str

    def __str__(self) -> str:
        where = f"module {self.module!r}, " if self.module else ""
        return f"{self.target} ({where}{self.source or 'line not known'})"


@dataclass(frozen=True)
class Mixing:
    """What came of a batch and its parts."""

    laws: Mapping[str, Law]
    """By node name; a law that may hold by chance counts as none."""
    wrong: tuple[int, ...] = ()
    """The flat outputs that are not what the whole batch gives."""
    fault: Fault | None = None
    """The first op of these."""
    loss: tuple[float, float] | None = None
    """Of the whole batch, and of its parts together."""
    gradient: tuple[float, str] | None = None
    """The largest difference of gradients, relative to the largest gradient of that parameter, and its name."""
    gradient_here: tuple[float, str] | None = None
    """The same with the parameters of the model as they are."""
    exact: bool = True
    """It was run in float64."""
    norms: tuple[str, ...] = ()
    """Layers that normalise over the batch: modules."""
    differs: Mapping[int, float] = field(default_factory=dict)
    """Wrong outputs that are numbers: by how much, relative to the whole."""
    fragile: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Outputs that are right in whole numbers of this batch alone, which may be chance: the nodes that make it so."""
    lost: frozenset[str] = frozenset()
    """Nodes that have no law."""

    @property
    def same_gradients(self) -> bool:
        return self.gradient is None or self.gradient[0] <= _SAME_GRADIENT[self.exact]

    @property
    def same(self) -> bool:
        return not self.wrong and self.same_gradients


@dataclass(frozen=True)
class Parts:
    """Leaves of a whole batch and of its parts, and the outputs that are sums over the parts instead of means."""

    whole: Sequence[Any]
    parts: Sequence[Sequence[Any]]
    sizes: tuple[int, ...]
    sums: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()
    """Outputs that are put together in another way, which is not looked at."""


def study(recording: Recording, split: Parts, others: Iterable[Parts] = ()) -> Mixing:
    """Run a recording on a batch and on its parts; nothing of the model changes.

    It is run twice: with the parameters of the model, and with moved ones. Values that happen to be equal at the start
    (closed gates, all samples of one kind) differ with moved parameters, and values that moved parameters saturate (a
    sparse attention that becomes one-hot, so that its entropy is zero) differ with those of the model.

    Counts of samples that have met (hits, flags, places in an order) are whole numbers, which may agree by chance. Such
    outputs must be right for `others` too: other samples of the same batch, each with parameters of its own.
    """
    with evaluating(recording.root):
        found = _study(recording, split)
        with suppress(Exception):  # a model may refuse parameters that are not its own
            moved = _study(recording, split, moved=0)
            if moved.loss is None or math.isfinite(sum(moved.loss)):
                found = _both(moved, found)
        found = _confirmed(recording, found, found)
        for seed, other in enumerate(others if found.fragile else (), 1):
            with suppress(Exception):  # or samples that it was not recorded on
                found = _confirmed(recording, found, _study(recording, other, moved=seed, gradients=False))
        return found


def _confirmed(recording: Recording, found: Mixing, again: Mixing) -> Mixing:
    """What still holds after another run: an output is wrong, too, if an op that it counts on had its law by chance."""
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
        differs={**{i: again.differs.get(i, float("nan")) for i in more}, **found.differs},
    )


def _both(moved: Mixing, here: Mixing) -> Mixing:
    """The laws that hold with both sets of parameters, the differences with either, their size with the model's own."""
    laws = {name: law if moved.laws.get(name) == law else UNKNOWN for name, law in here.laws.items()}
    for name, law in here.laws.items():  # all samples in one place look shared
        other = moved.laws.get(name)
        if other is not None and law.kind == "shared" and other.merges:
            laws[name] = other
        elif other is not None and other.kind == "shared" and law.merges:  # so do saturated ones
            laws[name] = law
    nothing: frozenset[str] = frozenset()
    outputs = {*moved.fragile, *here.fragile}
    return replace(
        moved,
        laws=laws,
        wrong=tuple(sorted({*moved.wrong, *here.wrong})),
        fault=moved.fault or here.fault,
        loss=here.loss,
        gradient=max((g for g in (moved.gradient, here.gradient) if g is not None), default=None),
        gradient_here=here.gradient,
        exact=moved.exact and here.exact,
        differs={**dict.fromkeys(moved.wrong, 0.0), **here.differs},
        fragile={i: moved.fragile.get(i, nothing) | here.fragile.get(i, nothing) for i in outputs},
        lost=moved.lost | here.lost,
    )


def _study(recording: Recording, split: Parts, moved: int | None = None, gradients: bool = True) -> Mixing:
    pair = Lockstep(recording, split.whole, split.parts, split.sizes, moved)
    pair.run()
    outputs = _outputs(recording)
    wrong = [
        i for i, node in enumerate(outputs) if i not in split.free and not _merges(recording, i, node, pair, split)
    ]
    loss, gradient = None, None
    if gradients and recording.loss_index is not None:
        loss, gradient = _losses(recording, pair, split)
    differs = {i: _relative(outputs[i], pair, split) for i in wrong}
    norms = dict.fromkeys(op_of(node).module or node.name for node in pair.norms)
    laws = {node.name: UNKNOWN if node in pair.chance else law for node, law in pair.laws.items()}
    fault = _first_fault(recording, pair.laws, [outputs[i] for i in wrong])
    fragile = {
        i: frozenset(source.name for source in sources_of([node]) & pair.fragile)
        for i, node in enumerate(outputs)
        if i not in (*wrong, *split.free) and node in pair.fragile
    }
    lost = frozenset(node.name for node, law in pair.laws.items() if not law.known)
    return Mixing(laws, tuple(wrong), fault, loss, gradient, gradient, pair.exact, tuple(norms), differs, fragile, lost)


def persistent_writes(recording: Recording) -> list[fx.Node]:
    """The ops that change what the next call reads: buffers in place, attributes that get a new tensor.

    The statistics of BatchNorm layers do not count, also where a subclass updates them itself (timm): they are known to
    follow micro-batches.
    """
    nodes = list(recording.graph.nodes)
    read = {str(node.target) for node in nodes if node.op == "get_attr"}
    kept = set().union(
        *(
            op_of(node).writes
            for node in nodes
            if node.op == "get_attr" and not _is_statistic(recording, str(node.target))
        )
    )
    found = []
    for node in nodes:
        if node.target is set_attribute:
            found += [node] if assigned_path(node) in read else []
        elif node.op in ("call_function", "call_method") and kept & op_of(node).mutates:
            found.append(node)
    return found


def _is_statistic(recording: Recording, path: str) -> bool:
    """Whether an attribute is a running mean or variance of a BatchNorm layer, or its count of batches."""
    owner, _, name = path.rpartition(".")
    if path in recording.constants:
        return False
    layer: Any = resolve(recording.root, owner) if owner else recording.root
    return isinstance(layer, _BatchNorm) and name in ("running_mean", "running_var", "num_batches_tracked")


def assigned_path(node: fx.Node) -> str:
    """The attribute that an assignment is about."""
    owner: Any = node.args[0]
    return f"{owner.target}.{node.args[1]}" if owner.target else str(node.args[1])


def _outputs(recording: Recording) -> list[Any]:
    flat: Any = next(reversed(recording.graph.nodes)).args[0]  # type: ignore[call-overload]
    return list(flat)


def _merges(recording: Recording, index: int, node: Any, pair: Lockstep, split: Parts) -> bool:
    """Whether the value of an output is what the runtime makes of the micro-batches."""
    if not isinstance(node, fx.Node):
        return True
    law, value = pair.laws[node], pair.whole.values[node]
    if index in split.sums and isinstance(value, torch.Tensor):
        return law.kind == "sum" or (law.kind == "shared" and not bool(value.detach().any()))
    if index == recording.loss_index or (isinstance(value, torch.Tensor) and value.dim() == 0):
        counts = not value.is_floating_point() and law.kind == "sum"
        return law.kind in ("mean", "shared") or counts
    if isinstance(value, torch.Tensor):
        return law.kind in ("shared", "mean") or (law.kind == "batched" and law.dim == 0)
    return law.known


def _losses(recording: Recording, pair: Lockstep, split: Parts) -> tuple[tuple[float, float], tuple[float, str] | None]:
    """The loss of the whole and of the parts together, and how far their gradients are apart."""
    index = recording.loss_index
    assert index is not None
    node = _outputs(recording)[index]
    whole: torch.Tensor = pair.whole.values[node]
    total = sum(split.sizes)
    weights = [1.0 if index in split.sums else size / total for size in split.sizes]
    together = torch.stack([part.values[node].reshape(()) * w for part, w in zip(pair.parts, weights)]).sum()
    losses = float(whole.detach()), float(together.detach())
    names = {id(parameter): name for name, parameter in recording.root.named_parameters()}
    trained = [(names.get(key, "?"), p) for key, p in pair.parameters.items() if p.requires_grad]
    if not trained or not whole.requires_grad or not together.requires_grad:
        return losses, None
    tensors = [p for _, p in trained]
    wanted = torch.autograd.grad(whole.reshape(()), tensors, retain_graph=True, allow_unused=True)
    got = torch.autograd.grad(together, tensors, allow_unused=True)
    largest = max((float(g.abs().max()) for g in wanted if g is not None and g.numel()), default=0.0)
    worst = (0.0, trained[0][0])
    for (name, _), a, b in zip(trained, wanted, got):
        if a is None and b is None:
            continue
        a, b = (x if x is not None else torch.zeros_like(y) for x, y in ((a, b), (b, a)))  # type: ignore[arg-type]
        if a.numel():
            scale = max(float(a.abs().max()), float(b.abs().max()), 1e-6 * largest, 1e-300)
            worst = max(worst, (float((a - b).abs().max()) / scale, name), key=lambda item: item[0])
    return losses, worst


def _relative(node: Any, pair: Lockstep, split: Parts) -> float:
    """The difference of a number between the whole and the mean (or sum) of its parts; nan for other values."""
    value = pair.whole.values[node]
    parts = [part.values[node] for part in pair.parts]
    if not isinstance(value, torch.Tensor) or value.dim() or not all(isinstance(p, torch.Tensor) for p in parts):
        return float("nan")
    index = _outputs(pair.recording).index(node)
    weights = [1.0 if index in split.sums else size / sum(split.sizes) for size in split.sizes]
    mean = sum(float(p.detach()) * weight for p, weight in zip(parts, weights))
    return abs(mean - float(value.detach())) / max(abs(float(value.detach())), 1e-12)


def _first_fault(recording: Recording, laws: Mapping[fx.Node, Law], outputs: Sequence[Any]) -> Fault | None:
    """The first op on the way to these outputs that has no law, while all that it works on has."""
    on_the_way = sources_of(node for node in outputs if not laws[node].known)
    data: set[fx.Node] = set()
    """Nodes that hold something of the samples themselves, not only of their number."""
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


def sources_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are made of."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def fault_of(node: fx.Node) -> Fault:
    if node.op in ("get_attr", "output"):
        return Fault(node.name, target_name(node.target), "", "")
    return Fault(node.name, target_name(node.target).rpartition(".")[2], op_of(node).module, op_of(node).source)
