"""Which values of a recording follow the batch: their sizes, and what they are computed from."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import op_of, where_is
from pipepart.recording.trace import intrinsics

__all__ = ["Following", "Unknown"]


class Unknown(Exception):
    """The value of a node for the whole batch cannot be told from its values for micro-batches, as far as is known."""

    def __init__(self, node: fx.Node, why: str) -> None:
        where = node.name if node.op in ("get_attr", "output") else f"{node.name} in {where_is(node)}"
        super().__init__(f"{where}: {why}")
        self.node = node


class Following:
    """What the sizes of the recorded runs say: in one of them, nothing but the number of samples was another."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._nodes: list[fx.Node] = list(recording.graph.nodes)
        self._inputs = dict(zip((n for n in self._nodes if n.op == "placeholder"), recording.inputs))
        self._sizes = self._batch_sizes()

    def _batch_sizes(self) -> tuple[int, int, int] | None:
        """The recorded run with another number of samples, and the numbers of samples then and in the first run."""
        tensors = [node for node, spec in self._inputs.items() if spec.kind == "tensor" and spec.shape]
        rows = {node: op_of(node).rows for node in tensors}
        first = next((node for node in tensors if self._inputs[node].dynamic[:1] == (True,)), None)
        if first is None or not rows[first]:
            return None
        batch = rows[first][0]
        run = next((i for i, size in enumerate(batch) if size != batch[0]), None)
        if run is None:
            return None
        for node in tensors:
            for dim, row in enumerate(rows[node]):
                if row[run] != row[0] and (dim > 0 or (row[0], row[run]) != (batch[0], batch[run])):
                    return None  # other sizes were changed with it
        return run, batch[0], batch[run]

    @property
    def known(self) -> bool:
        """Whether the recording tells anything: its example could be run with another number of samples."""
        return self._sizes is not None

    def ragged(self, node: fx.Node) -> bool:
        """Whether the shape depends on the contents of tensors (selections by a mask)."""
        return op_of(node).dynamic_shape and op_of(node).shape != ()

    def dims(self, node: fx.Node) -> tuple[int, ...]:
        """The dimensions of a tensor whose size is a multiple of the number of samples."""
        if node.op == "get_attr":
            return ()
        meta = op_of(node)
        if meta.shape is None or self._sizes is None or self.ragged(node):
            raise Unknown(node, "its sizes are not known")
        rows = op_of(node).rows
        if len(rows) != len(meta.shape):
            raise Unknown(node, "its sizes were not seen in all recorded runs")
        run, size, other = self._sizes
        found = []
        for dim, row in enumerate(rows):
            if row[run] == row[0]:
                continue
            if row[run] * size != row[0] * other:
                raise Unknown(node, f"dimension {dim} is no multiple of the number of samples")
            found.append(dim)
        return tuple(found)

    def counts_samples(self, node: fx.Node) -> bool:
        """Whether a plain number is a size that is a multiple of the number of samples."""
        if node.target not in ("size", "numel") or self._sizes is None or self.ragged_source(node):
            return False
        run, size, other = self._sizes
        rows = op_of(node).rows
        return bool(rows) and rows[0][run] != rows[0][0] and rows[0][run] * size == rows[0][0] * other

    def ragged_source(self, node: fx.Node) -> bool:
        return any(self.ragged(source) for source in node.all_input_nodes)

    def depends(self, node: fx.Node) -> bool:
        """Whether the value for a micro-batch may differ from that for the whole batch."""
        return node in self._dependent

    @cached_property
    def _dependent(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self._nodes:
            if node.op == "placeholder":
                spec = self._inputs.get(node)
                if spec is not None and spec.kind == "tensor" and spec.shape and self._cut(node):
                    found.add(node)
            elif node.op not in ("get_attr", "output"):
                meta = op_of(node)
                if meta.random or (any(s in found for s in node.all_input_nodes) and not self._fixed_size(node)):
                    found.add(node)
        return found

    def _cut(self, node: fx.Node) -> bool:
        rows = op_of(node).rows
        return not rows or self._sizes is None or rows[0][self._sizes[0]] != rows[0][0]

    def _fixed_size(self, node: fx.Node) -> bool:
        """A size that was the same with another number of samples."""
        rows = op_of(node).rows
        if node.target != "size" or not op_of(node).is_number or not rows or self._sizes is None:
            return False
        return not self.ragged_source(node) and rows[0][self._sizes[0]] == rows[0][0]

    def take(self, node: fx.Node) -> None:
        """A read of a buffer that was not in the recording."""
        self._pure.add(node)

    def pure(self, node: fx.Node) -> bool:
        """Whether a value comes from the batch, constants and buffers alone: no parameters, no random numbers."""
        return node in self._pure

    @cached_property
    def _pure(self) -> set[fx.Node]:
        touching: dict[Any, list[fx.Node]] = {}
        last: dict[Any, int] = {}
        for i, node in enumerate(self._nodes):
            for storage in op_of(node).reads | op_of(node).writes:
                touching.setdefault(storage, []).append(node)
            for storage in op_of(node).mutates:
                last[storage] = i
        position = {node: i for i, node in enumerate(self._nodes)}
        banned: set[fx.Node] = set()
        while True:
            good: set[fx.Node] = set()
            for node in self._nodes:
                if node not in banned and self._is_pure(node, good):
                    good.add(node)
            spoiled: set[fx.Node] = set()
            for storage, end in last.items():  # memory that is changed in place, also by others
                members = [node for node in touching[storage] if position[node] <= end]
                if any(node not in good or node.op == "get_attr" for node in members):
                    spoiled.update(members)
            if spoiled <= banned:
                return good
            banned |= spoiled

    def _is_pure(self, node: fx.Node, good: set[fx.Node]) -> bool:
        if node.op == "placeholder":
            return node in self._inputs and not op_of(node).requires_grad
        if node.op == "get_attr":
            return self._is_fixed(str(node.target))
        if node.op not in ("call_function", "call_method"):
            return False
        meta = op_of(node)
        if meta.random or meta.requires_grad or op_of(node).stateful:
            return False
        if node.target in (intrinsics.check, intrinsics.method_of, intrinsics.set_attribute, intrinsics.call_object):
            return False
        return all(source in good for source in node.all_input_nodes)

    def _is_fixed(self, path: str) -> bool:
        if path in self._recording.constants:
            return True
        try:
            value = resolve(self._recording.root, path)
        except AttributeError:
            return False
        return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
