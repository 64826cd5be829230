"""The graph of a recorded model as plain data: what planning works on, without modules and without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import networkx as nx
import torch

__all__ = ["Op", "OpGraph"]


@dataclass(frozen=True)
class Op:
    """One op: where it comes from in the model, what it makes and what it holds."""

    name: str
    kind: str
    """``input``, ``module``, ``function``, ``method``, ``number`` or ``output``."""
    target: str
    module: str
    module_class: str
    source: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    output_bytes: int
    requires_grad: bool
    parameters: tuple[str, ...]
    parameter_bytes: int
    flops: int
    random: bool
    dynamic_shape: bool
    replicable: bool


@dataclass(frozen=True)
class OpGraph:
    """Ops in program order, the edges between them, and groups of ops that must stay in one chunk."""

    ops: tuple[Op, ...]
    edges: tuple[tuple[int, int], ...]
    colocated: tuple[tuple[int, ...], ...]
    hash: str

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.ops)}

    def index(self, name: str) -> int:
        """The position of the op with this name."""
        return self._positions[name]

    def nx(self) -> nx.DiGraph:
        """The graph for networkx: nodes are positions, with all fields of the op as attributes."""
        graph = nx.DiGraph()
        for i, op in enumerate(self.ops):
            graph.add_node(i, **asdict(op))
        graph.add_edges_from(self.edges)
        return graph

    def chunks_at(self, cuts: Sequence[int]) -> dict[str, int]:
        """The chunk of each op when program order is cut before the ops at these positions.

        Ops that must stay together move to the last chunk that any of them is in, and what follows them moves along.
        """
        return self.repaired([sum(position >= cut for cut in cuts) for position in range(len(self.ops))])

    def repaired(self, chunks: Sequence[int]) -> dict[str, int]:
        """The nearest valid assignment to `chunks` (one per op) that only moves ops to later chunks."""
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
