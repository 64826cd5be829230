"""Graph of a recorded model as plain data, for planning: ops, their dependencies and groups, without modules and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property

import networkx as nx
import torch.fx as fx

from pipepart.graph.heads import Head, find_heads
from pipepart.recording.execution.colocate import colocated
from pipepart.recording.execution.ops_run import tensor_names, used_tensors
from pipepart.recording.fingerprint import target_name
from pipepart.recording.op import OpData, op_of
from pipepart.recording.recorded import Recording

__all__ = ["HeadOps", "Op", "OpGraph", "op_graph"]


@dataclass(frozen=True, kw_only=True)
class Op(OpData):
    """One op of an `OpGraph`: the plain data of its recorded node, its name and its parameters."""

    name: str
    kind: str
    """``input``, ``module``, ``function``, ``method``, ``number`` or ``output``."""
    target: str
    """Name of the module, function or method that is called."""
    parameters: tuple[str, ...] = ()
    parameter_bytes: int = 0


@dataclass(frozen=True)
class HeadOps:
    """The positions of the ops of a head: a linear layer whose scores only a cross-entropy reads."""

    linear: int
    loss: int
    between: tuple[int, ...]
    """Views and conversions of the scores."""
    hidden: int
    """The op that makes the input of the linear layer."""
    classes: int
    """The size of the vocabulary."""

    @property
    def ops(self) -> tuple[int, ...]:
        return (self.linear, *self.between, self.loss)


@dataclass(frozen=True)
class OpGraph:
    """Ops in program order, the dependencies between them, and groups of ops that must stay in one chunk."""

    ops: tuple[Op, ...]
    edges: tuple[tuple[int, int], ...]
    """Pairs of positions (source, user): the user takes the value of the source."""
    colocated: tuple[tuple[int, ...], ...]
    hash: str
    heads: tuple[HeadOps, ...] = ()
    """Heads that can be run in slices."""
    whole_heads: tuple[str, ...] = ()
    """The reasons why other heads cannot be run in slices."""

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.ops)}

    def index(self, name: str) -> int:
        """Return the position of the op with this name."""
        return self._positions[name]

    def nx(self) -> nx.DiGraph:
        """Return the graph for networkx. Its nodes are positions of ops, with all fields of the op as attributes."""
        graph = nx.DiGraph()
        for i, op in enumerate(self.ops):
            graph.add_node(i, **asdict(op))
        graph.add_edges_from(self.edges)
        return graph

    def chunks_at(self, cuts: Sequence[int]) -> dict[str, int]:
        """Return the chunk of each op for cuts before the ops at these positions of the program order.

        Ops that must stay together move to the last chunk that holds any of them, and later ops move with them.
        """
        return self.repaired([sum(position >= cut for cut in cuts) for position in range(len(self.ops))])

    def repaired(self, chunks: Sequence[int]) -> dict[str, int]:
        """Return the valid assignment nearest to `chunks` (one per op) that only moves ops to later chunks."""
        chunk = list(chunks)
        changed = True
        while changed:
            changed = False
            for group in self.colocated:
                latest = max(chunk[i] for i in group)
                for i in group:
                    if chunk[i] != latest:
                        chunk[i], changed = latest, True
            for source, target in self.edges:
                op = self.ops[source]
                if chunk[source] > chunk[target] and not op.replicable and op.kind != "input":
                    chunk[target], changed = chunk[source], True
        return {op.name: place for op, place in zip(self.ops, chunk)}


_KINDS = {"placeholder": "input", "call_module": "module", "call_function": "function", "call_method": "method"}


def op_graph(recording: Recording) -> OpGraph:
    """Return the ops of a recording in program order; reads of parameters and buffers belong to their users."""
    nodes = recording.ops
    position = {node: i for i, node in enumerate(nodes)}
    sizes = {name: p.numel() * p.element_size() for name, p in recording.root.named_parameters()}
    names = tensor_names(recording.root)
    ops = tuple(_op(recording, node, sizes, names) for node in nodes)
    edges = tuple(
        (position[source], i) for i, node in enumerate(nodes) for source in node.all_input_nodes if source in position
    )
    groups = tuple(tuple(position[node] for node in group) for group in colocated(recording))
    found = find_heads(recording)
    heads = tuple(_head(head, position) for head in found.heads)
    return OpGraph(ops, edges, groups, recording.hash, heads, found.reasons)


def _head(head: Head, position: Mapping[fx.Node, int]) -> HeadOps:
    between = tuple(position[step] for step in head.steps)
    hidden, linear, loss = position[head.hidden], position[head.linear], position[head.loss.node]
    return HeadOps(linear, loss, between, hidden, head.classes)


def _op(recording: Recording, node: fx.Node, sizes: dict[str, int], names: dict[int, str]) -> Op:
    meta = op_of(node)
    is_number = meta.is_number and node.op != "placeholder"
    used = () if node.op == "output" else used_tensors(recording, [node], names)
    parameters = tuple(name for name in used if name in sizes)
    return Op(
        **{field.name: getattr(meta, field.name) for field in fields(OpData)},
        name=node.name,
        kind="number" if is_number else _KINDS.get(node.op, node.op),
        target=target_name(node.target),
        parameters=parameters,
        parameter_bytes=sum(sizes[name] for name in parameters),
    )
