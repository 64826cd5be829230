"""The tail: the ops from the first one that makes samples meet on, which run once per batch on what all micro-batches gave.

```
body   F1 F2 F3 F4                  B1 B2 B3 B4      on micro-batches, over all stages
tail               cat  F  B  cut                    on the whole batch, on the last stage
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording import Recording
from pipepart.recording.execution.emit import executable
from pipepart.recording.execution.ops_run import RecordedGraph, used_tensors
from pipepart.recording.trace.intrinsics import set_attribute
from pipepart.samples.laws import Law
from pipepart.samples.mixing import Mixing, assigned_path, fault_of, persistent_writes, sources_of

__all__ = ["Refused", "Tail", "TailCut", "cut_tail"]

_FEW = 0.1
"""The share of a model's parameters that a tail may use; all of them are on the last stage."""
_STATISTICS = ("batch_norm", "native_batch_norm")


class Refused(Exception):
    """The ops cannot run once per batch; the text says why."""


@dataclass(frozen=True)
class TailCut:
    """Where a recording is cut, in names: the same on every rank."""

    outputs: tuple[int, ...]
    """Flat outputs of the recording that the tail makes."""
    ops: tuple[str, ...]
    inputs: tuple[tuple[str, Law], ...]
    """The values of the body that the tail works on, and how those of micro-batches make up that of the batch."""
    loss: bool
    """The loss is among the outputs: backwards can only begin when the tail has run."""
    buffers: tuple[str, ...] = ()
    """What the tail changes in place."""


def cut_tail(recording: Recording, mixing: Mixing) -> TailCut | None:
    """The tail of a recording, or None if it needs none. `Refused` if there is one that cannot be cut off."""
    outputs = _outputs(recording)
    writes = [n for n in persistent_writes(recording) if getattr(n.target, "__name__", "") not in _STATISTICS]
    if not mixing.wrong and not mixing.same_gradients:
        raise Refused("samples meet in backward only (a hook, or a function with its own backward)")
    if not mixing.wrong and not writes:
        return None
    laws = mixing.laws
    for node in writes:
        value: Any = node.args[2] if node.target is set_attribute else None
        if isinstance(value, fx.Node) and laws[value.name].kind in ("batched", "blocks", "rows"):
            raise Refused(f"{fault_of(node)} keeps samples of a batch in an attribute for the next one")
    tail, inputs = _grown(recording, [outputs[i] for i in mixing.wrong], writes, laws)
    kept = [out for i, out in enumerate(outputs) if i not in mixing.wrong and isinstance(out, fx.Node)]
    _check_apart(tail, [*inputs, *kept], writes)
    cut = TailCut(
        outputs=mixing.wrong,
        ops=tuple(node.name for node in recording.graph.nodes if node in tail),
        inputs=tuple((node.name, laws[node.name]) for node in recording.graph.nodes if node in inputs),
        loss=recording.loss_index in mixing.wrong,
        buffers=tuple(_written(recording, [node for node in writes if node in tail])),
    )
    _check_small(recording, tail)
    return cut


def _grown(
    recording: Recording, outputs: Sequence[Any], writes: Sequence[fx.Node], laws: Mapping[str, Law]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """From the outputs that are wrong and the writes back to values that can be put together."""
    fixed, after = _parameters_only(recording), _descendants(recording, writes)
    overwritten = _overwritten(recording)
    tail: set[fx.Node] = set()
    inputs: set[fx.Node] = set()
    todo: list[fx.Node] = [*outputs, *writes]
    while todo:
        node = todo.pop()
        if node in tail or node in inputs or node.op == "get_attr":
            continue
        law = laws[node.name]
        value = node.op == "placeholder" or node.meta["op"].shape is not None or node.meta["op"].is_number
        loose = law.kind == "shared" and (node in fixed or (node.op != "placeholder" and node.meta["op"].requires_grad))
        if node.op == "placeholder" or (
            node not in after and value and law.merges and not loose and node not in overwritten
        ):
            if not law.merges:
                raise Refused(f"the input {node.name} of the batch is not cut along one dimension")
            inputs.add(node)
            continue
        tail.add(node)
        todo.extend(node.all_input_nodes)
    return tail, inputs


def _descendants(recording: Recording, writes: Sequence[fx.Node]) -> set[fx.Node]:
    """The writes and all that works on what they have written."""
    found = set(writes)
    for node in recording.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _parameters_only(recording: Recording) -> set[fx.Node]:
    """Ops that work on parameters, buffers and constants alone, which the tail computes for itself."""
    found: set[fx.Node] = set()
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            continue
        if all(source in found or source.op == "get_attr" for source in node.all_input_nodes):
            found.add(node)
    return found


def _overwritten(recording: Recording) -> set[fx.Node]:
    """Values whose memory a later op changes: at the end of a chunk they are not there any more."""
    position = {node: i for i, node in enumerate(recording.graph.nodes)}
    last: dict[Any, int] = {}
    for node in recording.graph.nodes:
        for storage in node.meta.get("storages", ((), (), ()))[2]:
            last[storage] = position[node]
    return {
        node
        for node in recording.graph.nodes
        if any(last.get(storage, -1) > position[node] for storage in node.meta.get("storages", ((), (), ()))[1])
    }


def _check_apart(tail: set[fx.Node], results: Iterable[fx.Node], writes: Sequence[fx.Node]) -> None:
    """What draws random numbers or changes a buffer can be in the body or in the tail, not in both."""
    body = sources_of(results)
    for node in sorted(tail & body, key=lambda item: item.name):
        meta = node.meta["op"]
        if meta.random:
            raise Refused(f"{fault_of(node)} draws random numbers that the micro-batches and the whole batch both use")
        if node in writes:
            raise Refused(f"{fault_of(node)} changes a buffer that the rest of the step reads afterwards")


def _check_small(recording: Recording, tail: set[fx.Node]) -> None:
    sizes = {name: parameter.numel() for name, parameter in recording.root.named_parameters()}
    used = sum(sizes.get(name, 0) for name in used_tensors(recording, list(tail)))
    if used > _FEW * sum(sizes.values()):
        raise Refused(
            f"the ops after it hold {used / max(sum(sizes.values()), 1):.0%} of the parameters, and at most {_FEW:.0%} "
            "can be run once per batch on the last stage"
        )


def _written(recording: Recording, writes: Sequence[fx.Node]) -> list[str]:
    """The names of the buffers that these ops change."""
    changed = set().union(*(node.meta["storages"][2] for node in writes))
    reads = [n for n in recording.graph.nodes if n.op == "get_attr" and n.meta["storages"][1] & changed]
    assigned = [assigned_path(node) for node in writes if node.target is set_attribute]
    return sorted({*(str(node.target) for node in reads), *assigned})


def _outputs(recording: Recording) -> list[Any]:
    flat: Any = next(reversed(recording.graph.nodes)).args[0]  # type: ignore[call-overload]
    return list(flat)


class Tail:
    """A recording cut into a body and a tail, ready to be laid out."""

    def __init__(self, recording: Recording, cut: TailCut, device: torch.device | None = None) -> None:
        nodes = {node.name: node for node in recording.graph.nodes}
        outputs = _outputs(recording)
        self.cut, self.recording = cut, recording
        self.kept = tuple(i for i in range(len(outputs)) if i not in cut.outputs)
        """The outputs of the recording that the body makes, in its order; the inputs of the tail follow them."""
        ops, sources = [nodes[name] for name in cut.ops], [nodes[name] for name, _ in cut.inputs]
        self.module: RecordedGraph = executable(recording, ops, sources, [outputs[i] for i in cut.outputs], device)
        names = {name for name, _ in recording.root.named_parameters()}
        used = used_tensors(recording, ops)
        self.parameters = tuple(name for name in used if name in names)
        self.buffers = tuple(name for name in used if name not in names)
        self.inplace = any(node.meta["op"].inplace for node in ops)
        self.laws = tuple(law for _, law in cut.inputs)
        self.roots = tuple(len(self.kept) + i for i, node in enumerate(sources) if cut.loss and self._trained(node))
        """The outputs of the body that gradients come in for, if the loss is in the tail."""
        self.loss = cut.outputs.index(recording.loss_index) if cut.loss and recording.loss_index is not None else None
        """The loss among the outputs of the tail."""
        self.body = self._body([*(outputs[i] for i in self.kept), *sources])

    @staticmethod
    def _trained(node: fx.Node) -> bool:
        return node.op != "placeholder" and bool(node.meta["op"].requires_grad) and not node.meta["op"].is_number

    def _body(self, results: Sequence[Any]) -> Recording:
        """The recording without the tail."""
        recording = self.recording
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        wanted = sources_of(out for out in results if isinstance(out, fx.Node))
        tail = set(self.cut.ops)
        for node in recording.graph.nodes:
            if node.op == "output":
                made = graph.output(tuple(copies[out] if isinstance(out, fx.Node) else out for out in results))
                made.meta = dict(node.meta)
                continue
            if node.op not in ("placeholder", "get_attr") and node not in wanted and node.name in tail:
                continue
            if any(source not in copies for source in node.all_input_nodes):
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].name = node.name
        for node, copy in copies.items():
            copy.meta = {
                **node.meta,
                "differentiates": frozenset(copies[o] for o in node.meta["differentiates"] if o in copies),
            }
        index = recording.loss_index
        loss = self.kept.index(index) if index is not None and index in self.kept else None
        return dataclasses.replace(recording, graph=graph, loss_index=loss, roots=self.roots, extras=())
