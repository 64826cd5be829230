"""Values of a recording that follow the batch: their sizes, and the values from which they are computed.

Ops are identified by plain names: `a + b`, `torch.add(a, b)` and `a.add_(b)` are one op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import op_of, where_is
from pipepart.recording.recorded_run import intrinsics

__all__ = [
    "Following",
    "Unknown",
    "argument",
    "assigned_path",
    "before",
    "dims_of",
    "name_of",
    "operands",
    "outputs_of",
    "sources_of",
]

_HOMES = ("torch", "_operator", "builtins", "math")
_SAME = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg",
    "itruediv": "div", "iadd": "add", "isub": "sub", "imul": "mul", "radd": "add", "rmul": "mul", "rtruediv": "rdiv",
    "concat": "cat", "concatenate": "cat", "clamp_min": "clamp",
}  # fmt: skip


# ---- ops and their arguments


def name_of(node: fx.Node) -> str:
    """Return the name of the op of torch or Python that a node calls; empty for calls of anything else."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target: Any = node.target
        home = str(getattr(target, "__module__", None) or "torch")
        if hasattr(target, "stable_name") or home.partition(".")[0] not in _HOMES:
            return ""
        name = str(getattr(target, "__name__", ""))
    else:
        return ""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    elif name.endswith("_") and not name.startswith("_"):
        name = name[:-1]  # in place
    return _SAME.get(name, name)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, positional or named; a method's own tensor is at position 0."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def operands(node: fx.Node) -> tuple[Any, Any]:
    """Return the two operands of an arithmetic op, in the order of the arithmetic."""
    first, second = argument(node, 0, "input"), argument(node, 1, "other")
    return (second, first) if name_of(node) in ("rsub", "rdiv") else (first, second)


def dims_of(node: fx.Node, rank: int) -> tuple[int, ...] | None:
    """Return the dimensions that a reduction goes over, counted from the front; None if they are not plain numbers."""
    dims = argument(node, 1, "dim", node.kwargs.get("axis"))
    if dims is None or dims in ((), []):
        return tuple(range(rank))
    wanted: list[Any] = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, (tuple, list)) else [None]
    if any(type(dim) is not int for dim in wanted):
        return None
    return tuple(sorted(dim % rank if rank else dim for dim in wanted))


def before(value: Any, names: Collection[str]) -> Any:
    """Return the value to which a chain of ops with these names was applied; the value itself if there is no such op."""
    while isinstance(value, fx.Node) and name_of(value) in names:
        value = value.args[0]
    return value


def sources_of(nodes: Iterable[fx.Node], stop: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """Return these nodes and all nodes from which they are computed; the walk ends before nodes for which `stop` is true."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found and not stop(node):
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def assigned_path(node: fx.Node) -> str:
    """Return the path of the attribute that an assignment sets."""
    owner: Any = node.args[0]
    return f"{owner.target}.{node.args[1]}" if owner.target else str(node.args[1])


def outputs_of(graph: fx.Graph) -> list[Any]:
    """Return the flat outputs of a recorded graph."""
    output: fx.Node = next(reversed(graph.nodes))
    results: Any = output.args[0]
    return list(results)


# ---- dependence on the batch


class Unknown(Exception):
    """The value of a node for the whole batch does not follow from its values for micro-batches by a known rule."""

    def __init__(self, node: fx.Node, why: str) -> None:
        where = node.name if node.op in ("get_attr", "output") else f"{node.name} in {where_is(node)}"
        super().__init__(f"{where}: {why}")


@dataclass(frozen=True)
class _Sizes:
    """A recorded run that differs from the first run only in its number of samples."""

    run: int
    first: int
    """The number of samples in the first run."""
    other: int
    """The number of samples in this run."""

    def differ(self, row: Sequence[int]) -> bool:
        """Return whether a size, given for all runs, follows the number of samples."""
        return row[self.run] != row[0]

    def scale(self, row: Sequence[int]) -> bool:
        """Return whether a size, given for all runs, is a multiple of the number of samples."""
        return self.differ(row) and row[self.run] * self.first == row[0] * self.other


class Following:
    """The dependence of values on the batch, as the sizes of the recorded runs and the ops between them show it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._nodes: list[fx.Node] = list(recording.graph.nodes)
        self._inputs = dict(zip((n for n in self._nodes if n.op == "placeholder"), recording.inputs))
        self._sizes = self._batch_sizes()

    def _batch_sizes(self) -> _Sizes | None:
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
        return _Sizes(run, batch[0], batch[run])

    @property
    def known(self) -> bool:
        """Whether the recording has a run with another number of samples; without it, nothing is known."""
        return self._sizes is not None

    def ragged(self, node: fx.Node) -> bool:
        """Return whether the shape depends on the contents of tensors (selections by a mask)."""
        return op_of(node).dynamic_shape and op_of(node).shape != ()

    def dims(self, node: fx.Node) -> tuple[int, ...]:
        """Return the dimensions of a tensor whose size is a multiple of the number of samples."""
        if node.op == "get_attr":
            return ()
        meta = op_of(node)
        if meta.shape is None or self._sizes is None or self.ragged(node):
            raise Unknown(node, "its sizes are not known")
        rows = op_of(node).rows
        if len(rows) != len(meta.shape):
            raise Unknown(node, "its sizes were not seen in all recorded runs")
        found = [dim for dim, row in enumerate(rows) if self._sizes.differ(row)]
        for dim in found:
            if not self._sizes.scale(rows[dim]):
                raise Unknown(node, f"dimension {dim} is not a multiple of the number of samples")
        return tuple(found)

    def has_samples(self, node: fx.Node) -> bool:
        """Return whether a tensor has a dimension of samples, or may have one."""
        try:
            return self.ragged(node) or bool(self.dims(node))
        except Unknown:
            return True

    def counts_samples(self, node: fx.Node) -> bool:
        """Return whether a plain number is a size that is a multiple of the number of samples."""
        if node.target not in ("size", "numel") or self._sizes is None or self._of_ragged(node):
            return False
        rows = op_of(node).rows
        return bool(rows) and self._sizes.scale(rows[0])

    def _of_ragged(self, node: fx.Node) -> bool:
        return any(self.ragged(source) for source in node.all_input_nodes)

    def depends(self, node: fx.Node) -> bool:
        """Return whether the value for a micro-batch may differ from that for the whole batch."""
        return node in self._dependent

    @cached_property
    def _dependent(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self._nodes:
            if node.op == "placeholder":
                spec = self._inputs.get(node)
                if spec is not None and spec.kind == "tensor" and spec.shape and self._is_split(node):
                    found.add(node)
            elif node.op not in ("get_attr", "output"):
                meta = op_of(node)
                if meta.random or (any(s in found for s in node.all_input_nodes) and not self._fixed_size(node)):
                    found.add(node)
        return found

    def _is_split(self, node: fx.Node) -> bool:
        rows = op_of(node).rows
        return not rows or self._sizes is None or self._sizes.differ(rows[0])

    def _fixed_size(self, node: fx.Node) -> bool:
        """Return whether this is a size that was the same with another number of samples."""
        rows = op_of(node).rows
        if node.target != "size" or not op_of(node).is_number or not rows or self._sizes is None:
            return False
        return not self._of_ragged(node) and not self._sizes.differ(rows[0])

    def add_buffer(self, node: fx.Node) -> None:
        """Add a read of a buffer that was not in the recording."""
        self._pure.add(node)

    def pure(self, node: fx.Node) -> bool:
        """Return whether a value comes from the batch, constants and buffers alone: no parameters, no random numbers."""
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
