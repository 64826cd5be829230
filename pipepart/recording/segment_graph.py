"""The graph of a segment: some ops of a recording, with values of other segments as further inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from pipepart.recording.inputs.batching import Batching
from pipepart.recording.model_state import state
from pipepart.recording.op import op_of, set_op
from pipepart.recording.recorded import Input, Recording

__all__ = ["Segment", "SegmentRecording", "SegmentSource", "segment_graph"]


@dataclass(frozen=True, eq=False)
class SegmentRecording(Recording):
    """A part of a recording. Its last inputs are values that earlier parts compute."""

    source: Callable[[tuple[Any, ...], Mapping[str, Any] | None], list[Any]] | None = None
    """Computes the leaves of the arguments, with the values of earlier parts."""

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Return the leaves of the arguments, and the values that earlier parts compute from them on this process."""
        assert self.source is not None
        return self.source(args, kwargs)


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a step that is run on its own."""

    recording: SegmentRecording
    moment: int
    """The number of acts before the segment; with a loss, the segment is run for the act of this number."""
    trained: frozenset[str]
    """The parameters that get a gradient."""
    makes: tuple[int | str, ...]
    """For each output the output of the whole recording that it is, or the name of the value that it carries."""
    takes: tuple[str, ...]
    """The names of the carried values, which are inputs after those of the whole recording."""
    restored: tuple[str, ...]
    """Buffers that are set back after the segment, since the ops that change them have run before."""

    @property
    def has_loss(self) -> bool:
        return self.recording.loss_index is not None


@dataclass(frozen=True, eq=False)
class SegmentSource:
    """Computes the leaves of a segment from a batch, in one process: the segments before it are run for what they carry."""

    whole: Recording
    earlier: tuple[Segment, ...]
    takes: tuple[str, ...]
    inputs: tuple[Input, ...]
    """The inputs of the carried values."""
    numbers: Mapping[str, int]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> list[Any]:
        leaves = self.whole.flatten(args, {**self.numbers, **(kwargs or {})})
        if not self.takes:
            return leaves
        root: nn.Module = self.whole.root
        if state.is_abstract(root, self.whole.device):
            return [*leaves, *(torch.empty(spec.shape or (), dtype=spec.dtype) for spec in self.inputs)]
        known: dict[str, Any] = {}
        with state.preserved(root), torch.no_grad():
            for segment in self.earlier:
                given = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                values = segment.recording.graph_module()(*given, *(known[name] for name in segment.takes))
                known.update((name, value) for name, value in zip(segment.makes, values) if isinstance(name, str))
        return [*leaves, *(known[name] for name in self.takes)]


def segment_graph(
    recording: Recording,
    ops: Collection[fx.Node],
    carried: Sequence[fx.Node],
    results: Sequence[Any],
    flows: Collection[fx.Node],
    has_loss: bool,
) -> SegmentRecording:
    """Return the recording of these ops. With `has_loss`, the first of the results is the loss.

    `carried` are values that become inputs, and `flows` the nodes through which gradients of the loss flow.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    added: list[fx.Node] = []
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    for node in carried:
        copies[node] = graph.placeholder(f"carried_{node.name}")
        added.append(copies[node])
        plain = dataclasses.replace(
            op_of(node), requires_grad=False, random=False, stateful=False, replicable=False, checkpoint=(),
            mutates=frozenset(), reads=frozenset(), differentiates=frozenset(), flops=0,
        )  # fmt: skip
        set_op(copies[node], plain)
    for node in recording.graph.nodes:
        if node.op == "get_attr" or (node in ops and node not in copies):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].name = node.name
    output = graph.output(tuple(copies[out] if isinstance(out, fx.Node) else out for out in results))
    output.meta = dict(next(reversed(recording.graph.nodes)).meta)
    for node, copy in copies.items():
        if copy in added:
            continue
        op = op_of(node)
        through = frozenset(copies[o] for o in op.differentiates if o in copies and o in flows)
        kept = node in flows
        set_op(copy, dataclasses.replace(op, requires_grad=kept, differentiates=through if kept else frozenset()))
    inputs = tuple(_input(copy, node) for copy, node in zip(added, carried))
    fields = {field.name: getattr(recording, field.name) for field in dataclasses.fields(Recording)}
    fields.update(
        graph=graph,
        inputs=(*recording.inputs, *inputs),
        loss_index=0 if has_loss else None,
        extras=(),
        batching=_batching(recording, carried),
    )
    return SegmentRecording(**fields)


def _input(copy: fx.Node, node: fx.Node) -> Input:
    op = op_of(node)
    assert op.shape is not None
    known = len(op.rows) == len(op.shape)
    dynamic = tuple(len(set(row)) > 1 for row in op.rows) if known else (False,) * len(op.shape)
    return Input(copy.name, f"the value of {node.name}", "tensor", op.shape, op.dtype, dynamic=dynamic)


def _batching(recording: Recording, carried: Sequence[fx.Node]) -> Batching | None:
    """Return the dimensions of the samples of all inputs; carried values have theirs in dimension 0, or none."""
    own = recording.batching
    if own is None or own.in_pieces or not carried:
        return own
    leaves = recording.graph.find_nodes(op="placeholder")
    sizes = op_of(leaves[own.places[0]]).rows[:1]
    dims = [*own.dims, *[None] * (len(recording.inputs) - len(own.dims))]
    return Batching((*dims, *(0 if sizes and op_of(node).rows[:1] == sizes else None for node in carried)), own.samples)
