"""Division of a recording into chunks: modules that take imported values and return exported values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from pipepart.errors import CaptureError
from pipepart.recording.execution.colocate import colocated
from pipepart.recording.execution.emit import executable
from pipepart.recording.op import op_of, where_is
from pipepart.recording.recorded import Recording

__all__ = ["BATCH", "Chunk", "Edge", "split"]

BATCH = -1
"""The source of an edge that is a leaf of the batch."""


@dataclass(frozen=True)
class Edge:
    """A value that crosses from the chunk that makes it to the chunks that use it.

    `grad_targets` are the targets that send a gradient back: the value reaches the loss through them.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    grad_targets: tuple[int, ...]
    kind: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    nbytes: int
    dynamic_shape: bool


@dataclass(frozen=True)
class Chunk:
    """A part of the model: ``module(*imports) -> exports``; the last chunk returns the flat outputs of the recording."""

    index: int
    module: fx.GraphModule
    imports: tuple[Edge, ...]
    exports: tuple[Edge, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def split(
    recording: Recording,
    chunk_of: Mapping[str, int] | Sequence[int],
    chunks: int,
    *,
    devices: Sequence[torch.device | None] | None = None,
) -> tuple[Chunk, ...]:
    """Divide a recording: `chunk_of` gives the chunk of each op, by name or in program order (see `Recording.ops`).

    Values may only flow to the same or a later chunk. Cheap ops that depend only on the batch (masks, positions) are
    computed by every chunk that uses them, whatever chunk `chunk_of` gives. With `devices`, tensors that the model makes on the
    device of the example are made on the device of their chunk.
    """
    owner = _owners(recording, chunk_of, chunks)
    layout = _Layout(recording, owner, chunks)
    edges = layout.edges()
    names = {name for name, _ in recording.root.named_parameters()}
    result = []
    for index in range(chunks):
        imports = tuple(edges[node] for node in layout.imports[index])
        exports = layout.exports[index]
        last = index == chunks - 1
        outputs = layout.outputs if last else exports
        device = devices[index] if devices is not None else None
        module = executable(recording, layout.body[index], layout.imports[index], outputs, device, layout.sizes[index])
        result.append(
            Chunk(
                index,
                module,
                imports,
                tuple(edges[node] for node in exports),
                tuple(name for name in module._used if name in names),
                tuple(name for name in module._used if name not in names),
            )
        )
    return tuple(result)


def _owners(recording: Recording, chunk_of: Mapping[str, int] | Sequence[int], chunks: int) -> dict[fx.Node, int]:
    """Return the chunk of every op, after a check that all ops have one, values flow forward and groups are not divided."""
    ops = recording.ops
    if not isinstance(chunk_of, Mapping):
        if len(chunk_of) != len(ops):
            raise CaptureError(f"split: expected a chunk for each of the {len(ops)} ops, got {len(chunk_of)}")
        chunk_of = {node.name: chunk for node, chunk in zip(ops, chunk_of)}
    owner: dict[fx.Node, int] = {}
    for node in ops:
        if node.op in ("placeholder", "output"):
            continue
        if node.name not in chunk_of:
            raise CaptureError(f"split: op {node.name!r} ({where_is(node)}) has no chunk; expected one for each op")
        chunk = chunk_of[node.name]
        if not 0 <= chunk < chunks:
            raise CaptureError(f"split: op {node.name!r} has chunk {chunk}; expected 0 to {chunks - 1}")
        owner[node] = chunk
    for node in owner:
        for source in node.all_input_nodes:
            if source in owner and owner[source] > owner[node] and not op_of(source).replicable:
                raise CaptureError(
                    f"split: the edge {source.name} -> {node.name} goes back from chunk {owner[source]} to chunk "
                    f"{owner[node]} ({where_is(source)} -> {where_is(node)}); a value can only go to the same or a later chunk"
                )
    for group in colocated(recording):
        if len({owner[node] for node in group}) > 1:
            places = ", ".join(f"{node.name}: {owner[node]}" for node in group[:6])
            raise CaptureError(
                f"split: these ops share memory, a state or a tuple and must be in one chunk, got {places} "
                f"({where_is(group[0])})"
            )
    return owner


def _same_size(number: fx.Node, tensors: set[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return a dimension of one of these tensors that equals `number` in all recorded runs, and differs between runs."""
    rows = op_of(number).rows
    if not rows or len(set(rows[0])) == 1:
        return None
    for tensor in sorted(tensors, key=lambda node: node.name):
        if op_of(tensor).is_number or op_of(tensor).dynamic_shape:
            continue
        for dim, row in enumerate(op_of(tensor).rows):
            if row == rows[0]:
                return tensor, dim
    return None


class _Layout:
    """The nodes of each chunk, and the values that it imports and exports."""

    def __init__(self, recording: Recording, owner: dict[fx.Node, int], chunks: int):
        self.recording, self.owner, self.chunks = recording, owner, chunks
        nodes = list(recording.graph.nodes)
        self.position = {node: i for i, node in enumerate(nodes)}
        self.outputs: list[Any] = list(nodes[-1].args[0])
        self.body: list[list[fx.Node]] = []
        self.imports: list[list[fx.Node]] = []
        self.sizes: list[dict[fx.Node, tuple[fx.Node, int]]] = []
        for chunk in range(chunks):
            self._fill(chunk)
        needed = {node for group in self.imports for node in group}
        self.exports = [
            sorted((n for n in needed if owner.get(n) == chunk), key=self.position.__getitem__)
            for chunk in range(chunks)
        ]

    def _fill(self, chunk: int) -> None:
        """Collect the nodes of one chunk: its own, copies of replicable ones, and sizes of tensors that it imports."""
        roots = [node for node, place in self.owner.items() if place == chunk and not op_of(node).replicable]
        if chunk == self.chunks - 1:
            roots += [out for out in self.outputs if isinstance(out, fx.Node)]
        inside: set[fx.Node] = set()
        imported: set[fx.Node] = set()
        numbers: list[fx.Node] = []
        todo = list(roots)
        while todo:
            node = todo.pop()
            if node in inside or node in imported or node.op == "get_attr":
                continue
            if node.op == "placeholder":
                imported.add(node)
            elif op_of(node).replicable or self.owner[node] == chunk:
                inside.add(node)
                todo.extend(node.all_input_nodes)
            elif op_of(node).is_number:
                numbers.append(node)
            else:
                imported.add(node)
        sizes: dict[fx.Node, tuple[fx.Node, int]] = {}
        for node in numbers:
            self._number(node, inside, imported, sizes)
        self._spare_inputs(inside, imported, sizes)
        self.body.append(sorted(inside, key=self.position.__getitem__))
        self.imports.append(sorted(imported, key=self.position.__getitem__))
        self.sizes.append(sizes)

    def _number(
        self, node: fx.Node, inside: set[fx.Node], imported: set[fx.Node], sizes: dict[fx.Node, tuple[fx.Node, int]]
    ) -> None:
        """Take a number from a dimension of an imported tensor, or compute it; import it if neither is possible."""
        if node in inside or node in imported:
            return
        place = _same_size(node, imported)
        if place is not None:
            inside.add(node)
            sizes[node] = place
            return
        needed = self._computable(node, inside | imported)
        if needed is None:
            imported.add(node)
        else:
            inside.update(needed)

    def _spare_inputs(
        self, inside: set[fx.Node], imported: set[fx.Node], sizes: dict[fx.Node, tuple[fx.Node, int]]
    ) -> None:
        """Drop leaves of the batch that this chunk imports only for their sizes."""
        last = len(self.body) == self.chunks - 1
        for leaf in sorted((n for n in imported if n.op == "placeholder"), key=lambda n: -op_of(n).output_bytes):
            users = [user for user in leaf.users if user in inside and user not in sizes]
            kept = last and leaf in self.outputs
            if kept or not users or any(user.target != "size" or not op_of(user).is_number for user in users):
                continue
            places = {user: _same_size(user, imported - {leaf}) for user in users}
            if all(place is not None for place in places.values()):
                sizes.update({user: place for user, place in places.items() if place is not None})
                imported.discard(leaf)

    def _computable(self, node: fx.Node, here: set[fx.Node]) -> set[fx.Node] | None:
        if node in here or node.op == "get_attr":
            return set()
        if node.op == "placeholder" or not op_of(node).is_number or node.target == "item":
            return None
        needed = {node}
        for source in node.all_input_nodes:
            more = self._computable(source, here)
            if more is None:
                return None
            needed |= more
        return needed

    def edges(self) -> dict[fx.Node, Edge]:
        """Return the edge of every value that a chunk imports."""
        contributing = self._contributing()
        found: dict[fx.Node, Edge] = {}
        for group in self.imports:
            for node in group:
                if node in found:
                    continue
                targets = tuple(i for i, values in enumerate(self.imports) if node in values)
                found[node] = self._edge(node, targets, contributing)
        return found

    def _edge(self, node: fx.Node, targets: tuple[int, ...], contributing: set[fx.Node]) -> Edge:
        meta = op_of(node)
        grads: tuple[int, ...] = ()
        if meta.requires_grad and node.op != "placeholder":
            grads = tuple(chunk for chunk in targets if self._reaches_loss(node, chunk, contributing))
        return Edge(
            node.name,
            BATCH if node.op == "placeholder" else self.owner[node],
            targets,
            grads,
            "number" if meta.is_number else "tensor",
            meta.shape,
            meta.dtype,
            meta.output_bytes,
            meta.dynamic_shape,
        )

    def _losses(self) -> set[fx.Node]:
        index = self.recording.loss_index
        if index is not None:
            return {self.outputs[index]}
        if self.recording.roots:
            return {self.outputs[root] for root in self.recording.roots}
        return {out for out in self.outputs if isinstance(out, fx.Node)}

    def _contributing(self) -> set[fx.Node]:
        """Return the nodes with a differentiable path to the loss, or to any result if there is no loss."""
        found: set[fx.Node] = set()
        todo = list(self._losses())
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo.extend(op_of(node).differentiates)
        return found

    def _reaches_loss(self, node: fx.Node, chunk: int, contributing: set[fx.Node]) -> bool:
        if chunk == self.chunks - 1 and node in self._losses():
            return True
        return any(
            user in contributing and self.owner.get(user) == chunk and node in op_of(user).differentiates
            for user in node.users
        )
