"""The tail: the ops from the first one that combines samples on. They run once per batch, on the values of all micro-batches.

```
body   F1 F2 F3 F4                    B1 B2 B3 B4      on micro-batches, over all stages
tail               cat  F  B  split                    on the whole batch, on the last stage
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
from pipepart.recording.op import op_of, set_op
from pipepart.recording.recorded_run.intrinsics import set_attribute
from pipepart.samples.follow import outputs_of, sources_of
from pipepart.samples.kept_state import changed_buffers, persistent_writes
from pipepart.samples.laws import Law
from pipepart.samples.mixing import Mixing, fault_of

__all__ = ["Refused", "Tail", "TailCut", "cut_tail"]

_FEW = 0.1
"""The largest share of a model's parameters that a tail may use; all of them are on the last stage."""


class Refused(Exception):
    """The ops cannot run once per batch, for the reason in the text."""


@dataclass(frozen=True)
class TailCut:
    """The cut between the body and the tail of a recording, by names: the same on every rank."""

    outputs: tuple[int, ...]
    """Flat outputs of the recording that the tail makes."""
    ops: tuple[str, ...]
    inputs: Mapping[str, Law]
    """The values of the body on which the tail works, with the law that merges those of micro-batches."""
    loss: bool
    """Whether the loss is among the outputs, so that backwards can begin only after the tail has run."""
    buffers: tuple[str, ...] = ()
    """Buffers that the tail changes."""


def cut_tail(recording: Recording, mixing: Mixing) -> TailCut | None:
    """Return the cut before the tail of a recording; None if it needs no tail. Raises `Refused` if a tail is not possible."""
    outputs = outputs_of(recording.graph)
    writes = persistent_writes(recording)
    if not mixing.wrong and not mixing.same_gradients:
        raise Refused("samples are combined in backward only (by a hook, or a function with its own backward)")
    if not mixing.wrong and not writes:
        return None
    laws = mixing.laws
    for node in writes:
        value: Any = node.args[2] if node.target is set_attribute else None
        if isinstance(value, fx.Node) and laws[value.name].kind in ("batched", "blocks", "rows"):
            raise Refused(f"{fault_of(node)} keeps samples of a batch in an attribute for the next one")
    after = _descendants(recording, writes)
    # Outputs that show what the step has changed are those after the change by the whole batch.
    made = tuple(i for i, out in enumerate(outputs) if i in mixing.wrong or (isinstance(out, fx.Node) and out in after))
    tail, inputs = _grown(recording, [outputs[i] for i in made], writes, laws)
    kept = [out for i, out in enumerate(outputs) if i not in made and isinstance(out, fx.Node)]
    _check_apart(tail, [*inputs, *kept], writes)
    cut = TailCut(
        outputs=made,
        ops=tuple(node.name for node in recording.graph.nodes if node in tail),
        inputs={node.name: laws[node.name] for node in recording.graph.nodes if node in inputs},
        loss=recording.loss_index in made,
        buffers=tuple(changed_buffers(recording, [node for node in writes if node in tail])),
    )
    _check_small(recording, tail)
    return cut


def _grown(
    recording: Recording, outputs: Sequence[Any], writes: Sequence[fx.Node], laws: Mapping[str, Law]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the ops from wrong outputs and writes back to values that can be merged, and these values."""
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
        value = node.op == "placeholder" or op_of(node).shape is not None or op_of(node).is_number
        loose = law.kind == "shared" and (node in fixed or (node.op != "placeholder" and op_of(node).requires_grad))
        if node.op == "placeholder" or (
            node not in after and value and law.merges and not loose and node not in overwritten
        ):
            if not law.merges:
                raise Refused(f"the input {node.name} of the batch is not split along one dimension")
            inputs.add(node)
            continue
        tail.add(node)
        todo.extend(node.all_input_nodes)
    return tail, inputs


def _descendants(recording: Recording, writes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the writes and all ops that depend on them."""
    found = set(writes)
    for node in recording.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _parameters_only(recording: Recording) -> set[fx.Node]:
    """Return the ops that depend on parameters, buffers and constants alone, which the tail computes for itself."""
    found: set[fx.Node] = set()
    for node in recording.graph.nodes:
        if node.op != "placeholder" and all(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _overwritten(recording: Recording) -> set[fx.Node]:
    """Return the values whose memory a later op changes: at the end of a chunk they are lost."""
    position = {node: i for i, node in enumerate(recording.graph.nodes)}
    last: dict[Any, int] = {}
    for node in recording.graph.nodes:
        for storage in op_of(node).mutates:
            last[storage] = position[node]
    return {
        node
        for node in recording.graph.nodes
        if any(last.get(storage, -1) > position[node] for storage in op_of(node).writes)
    }


def _check_apart(tail: set[fx.Node], results: Iterable[fx.Node], writes: Sequence[fx.Node]) -> None:
    """Refuse ops that draw random numbers or change a buffer, if the body and the tail both need them."""
    body = sources_of(results)
    for node in sorted(tail & body, key=lambda item: item.name):
        if op_of(node).random:
            raise Refused(f"{fault_of(node)} draws random numbers that the micro-batches and the whole batch both use")
        if node in writes:
            raise Refused(f"{fault_of(node)} changes a buffer that the rest of the step reads afterwards")


def _check_small(recording: Recording, tail: set[fx.Node]) -> None:
    sizes = {name: parameter.numel() for name, parameter in recording.root.named_parameters()}
    used = sum(sizes.get(name, 0) for name in used_tensors(recording, list(tail)))
    if used > _FEW * sum(sizes.values()):
        raise Refused(
            f"the ops after it use {used / max(sum(sizes.values()), 1):.0%} of the parameters, and at most {_FEW:.0%} "
            "can be run once per batch on the last stage"
        )


class Tail:
    """A recording that is cut into a body and a tail."""

    def __init__(self, recording: Recording, cut: TailCut, device: torch.device | None = None) -> None:
        nodes = {node.name: node for node in recording.graph.nodes}
        outputs = outputs_of(recording.graph)
        self.cut, self.recording = cut, recording
        self.kept = tuple(i for i in range(len(outputs)) if i not in cut.outputs)
        """The outputs of the recording that the body makes, in order; in the body, the inputs of the tail follow them."""
        ops, sources = [nodes[name] for name in cut.ops], [nodes[name] for name in cut.inputs]
        self.module: RecordedGraph = executable(recording, ops, sources, [outputs[i] for i in cut.outputs], device)
        names = {name for name, _ in recording.root.named_parameters()}
        used = used_tensors(recording, ops)
        self.parameters = tuple(name for name in used if name in names)
        self.buffers = tuple(name for name in used if name not in names)
        self.inplace = any(op_of(node).inplace for node in ops)
        self.roots = tuple(len(self.kept) + i for i, node in enumerate(sources) if cut.loss and self._trained(node))
        """The outputs of the body that get gradients from the tail, if the loss is there."""
        self.loss = cut.outputs.index(recording.loss_index) if cut.loss and recording.loss_index is not None else None
        """The position of the loss among the outputs of the tail."""
        self.body = self._body([*(outputs[i] for i in self.kept), *sources])

    @staticmethod
    def _trained(node: fx.Node) -> bool:
        return node.op != "placeholder" and bool(op_of(node).requires_grad) and not op_of(node).is_number

    def _body(self, results: Sequence[Any]) -> Recording:
        """Return the recording without the tail."""
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
            through = frozenset(copies[o] for o in op_of(node).differentiates if o in copies)
            set_op(copy, dataclasses.replace(op_of(node), differentiates=through))
        index = recording.loss_index
        loss = self.kept.index(index) if index is not None and index in self.kept else None
        return dataclasses.replace(recording, graph=graph, loss_index=loss, roots=self.roots, extras=())
