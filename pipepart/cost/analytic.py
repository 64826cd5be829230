"""Computed costs: FLOPs and bytes of each op on the roofline of a device; no op is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipepart.cost.cluster import DeviceKind
from pipepart.cost.op_costs import OpCosts
from pipepart.graph import Op, OpGraph

__all__ = ["analytic"]


# fmt: off
_VIEWS = frozenset({
    "alias", "as_strided", "chunk", "contiguous", "detach", "dim", "expand", "expand_as", "flatten", "getattr",
    "getitem", "identity", "movedim", "mT", "narrow", "numel", "permute", "reshape", "reshape_as", "select", "size",
    "split", "squeeze", "swapaxes", "t", "T", "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "view_as",
})
_KEEP_NOTHING = frozenset({
    "add", "cat", "clone", "float", "iadd", "isub", "mean", "neg", "pad", "roll", "stack", "sub", "sum", "to", "type",
})
_KEEP_OUTPUT = frozenset({"exp", "log_softmax", "relu", "rsqrt", "sigmoid", "softmax", "sqrt", "tanh"})
_KEEP_BOTH = frozenset({"baddbmm", "bmm", "div", "einsum", "imul", "matmul", "mul", "pow", "truediv"})
_PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul"})
# fmt: on
_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class _Sizes:
    """The sizes of an op and its inputs, in bytes, for a micro-batch of the requested size."""

    flops: float
    inputs: float
    output: float
    parameters: float
    grad_inputs: int
    """Number of inputs that need a gradient."""
    dtype: str
    free: bool
    """True for an op that moves no bytes: a view, a number, an input."""


def analytic(graph: OpGraph, device: DeviceKind, *, batch_scale: float = 1.0, dtype: str | None = None) -> OpCosts:
    """Compute the costs of all ops of a graph on a kind of device.

    ``batch_scale``: size of a micro-batch relative to the batch that the graph was captured with; activations and
    FLOPs grow with it, parameters do not. ``dtype``: compute in this dtype (mixed precision) instead of the recorded one.
    """
    before: dict[int, list[int]] = {}
    for a, b in graph.edges:
        before.setdefault(b, []).append(a)
    sizes = [_sizes(graph.ops, i, before.get(i, []), batch_scale, dtype) for i in range(len(graph.ops))]
    return OpCosts(
        names=tuple(op.name for op in graph.ops),
        forward=tuple(_forward(size, device) for size in sizes),
        backward_input=tuple(_backward_input(op, size, device) for op, size in zip(graph.ops, sizes)),
        backward_weight=tuple(_backward_weight(op, size, device) for op, size in zip(graph.ops, sizes)),
        parameter_bytes=tuple(op.parameter_bytes for op in graph.ops),
        saved_bytes=_saved(graph.ops, before, sizes, batch_scale),
        output_bytes=tuple(round(op.output_bytes * batch_scale) for op in graph.ops),
        source="analytic",
    )


def _family(op: Op) -> str:
    """Return the short name of an op: ``Linear`` -> linear, ``torch.nn.functional.gelu`` -> gelu."""
    if op.kind == "module":
        return op.module_class.lower()
    return op.target.rsplit(".", 1)[-1].strip("_")


def _sizes(ops: Sequence[Op], index: int, before: Sequence[int], scale: float, dtype: str | None) -> _Sizes:
    op = ops[index]
    inputs = [ops[i] for i in before]
    family = _family(op)
    return _Sizes(
        flops=_flops(op, family, inputs) * scale,
        inputs=sum(other.output_bytes for other in inputs) * scale,
        output=op.output_bytes * scale,
        parameters=float(op.parameter_bytes),
        grad_inputs=sum(other.requires_grad for other in inputs),
        dtype=dtype or str(op.dtype or "float32").removeprefix("torch."),
        free=family in _VIEWS or op.kind in ("input", "number", "output"),
    )


def _flops(op: Op, family: str, inputs: Sequence[Op]) -> float:
    """Return the forward FLOPs: as counted in the recording, or estimated from the shapes.

    Ops other than products, convolutions and attention count one FLOP per element.
    """
    if op.flops > 0:
        return float(op.flops)
    if not op.shape or not op.output_bytes:
        return 0.0
    elements = math.prod(op.shape)
    item = op.output_bytes / max(elements, 1)
    if family == "linear" and op.parameter_bytes:
        return 2.0 * elements / op.shape[-1] * op.parameter_bytes / item
    if family.startswith("conv") and op.parameter_bytes and len(op.shape) > 1:
        return 2.0 * elements / op.shape[1] * op.parameter_bytes / item
    shapes = [other.shape for other in inputs if other.shape]
    if family == _ATTENTION and len(shapes) > 1 and len(shapes[1] or ()) > 1:
        return 4.0 * elements * (shapes[1] or (0, 0))[-2]
    if family in _PRODUCTS and shapes:
        return 2.0 * elements * (shapes[0] or (0,))[-1]
    return float(elements)


def _forward(size: _Sizes, device: DeviceKind) -> float:
    if size.free:
        return 0.0
    # A gather reads the rows it returns, not its whole table.
    parameters = min(size.parameters, size.output) if size.flops <= size.output else size.parameters
    return device.seconds(size.flops, size.inputs + parameters + size.output, size.dtype)


def _backward_input(op: Op, size: _Sizes, device: DeviceKind) -> float:
    """Return the seconds for the gradients of inputs: one product per input that needs one."""
    if size.free or not op.requires_grad or not size.grad_inputs:
        return 0.0
    products = size.grad_inputs if not op.parameter_bytes else 1
    return device.seconds(size.flops * products, size.output + 2 * size.inputs + size.parameters, size.dtype)


def _backward_weight(op: Op, size: _Sizes, device: DeviceKind) -> float:
    """Return the seconds for the gradients of parameters: as many FLOPs as the forward."""
    if size.free or not op.requires_grad or not op.parameter_bytes:
        return 0.0
    return device.seconds(size.flops, size.output + size.inputs + size.parameters, size.dtype)


def _saved(ops: Sequence[Op], before: dict[int, list[int]], sizes: Sequence[_Sizes], scale: float) -> tuple[int, ...]:
    """Return the bytes that each op keeps for backward. A tensor that several ops keep counts with the first of them."""
    kept: set[int] = set()
    origin = list(range(len(ops)))  # a view shares the storage of its source
    saved = []
    for index, (op, size) in enumerate(zip(ops, sizes)):
        sources = before.get(index, [])
        if size.free and sources and op.kind not in ("number", "output"):
            origin[index] = origin[sources[0]]
        total = 0.0
        if not size.free and op.requires_grad:
            for tensor in _kept_tensors(op, index, sources):
                root = origin[tensor]
                if root not in kept and ops[root].kind != "number":
                    kept.add(root)
                    total += max(ops[root].output_bytes, ops[tensor].output_bytes) * scale
            if "dropout" in _family(op):
                total += (math.prod(op.shape) if op.shape else 0) * scale  # the mask, a byte per element
        saved.append(round(total))
    return tuple(saved)


def _kept_tensors(op: Op, index: int, sources: Sequence[int]) -> Iterator[int]:
    """Yield the tensors that the backward of an op needs: its inputs, unless it is known to need less."""
    family = _family(op)
    if family in _KEEP_NOTHING or "dropout" in family:
        return
    if family in _KEEP_OUTPUT:
        yield index
        return
    if family in _KEEP_BOTH or family == _ATTENTION:
        yield from sources
        if family == _ATTENTION:
            yield index
        return
    yield from sources[:1] if op.parameter_bytes else sources
