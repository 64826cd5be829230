"""Forward FLOPs of each op by torch's own counter, on fake tensors: nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from pipepart.capture import intrinsics
from pipepart.capture.patches import is_metric
from pipepart.capture.recording import OpMeta, Recording
from pipepart.capture.state import preserved, stand_ins

__all__ = ["op_flops"]

_EFFECTS = (intrinsics.check, intrinsics.method_of, intrinsics.set_attribute)
_FREE = ("getitem", "view", "reshape", "transpose", "permute", "size", "check", "changed", "contiguous", "expand")


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    count: Any = flop_counter.sdpa_flop_count
    return int(count(query, key, value))


_EXTRA: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""What torch's counter does not know: the fused attention of the CPU."""


def op_flops(recording: Recording) -> dict[fx.Node, int]:
    """Forward FLOPs of the ops that torch can count (matrix products, convolutions, attention); others count as 0.

    Each op is run by itself on fake tensors of its recorded input shapes; one that needs data counts as 0.
    """
    found: dict[fx.Node, int] = {}
    with preserved(recording.root), stand_ins(recording.root) as mode, mode, torch.no_grad():
        for node in recording.ops:
            if node.op in ("placeholder", "output") or node.meta["op"].is_number or node.target in _EFFECTS:
                continue
            if node.op == "call_module" and is_metric(recording.root.get_submodule(str(node.target))):
                continue
            name = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if node.op != "call_module" and name in _FREE:
                continue
            found[node] = _count(recording, node)
    return found


def _count(recording: Recording, node: fx.Node) -> int:
    try:
        args, kwargs = fx.node.map_aggregate(
            (node.args, dict(node.kwargs)), lambda leaf: _value(recording, leaf) if isinstance(leaf, fx.Node) else leaf
        )
        call = _call(recording, node, args)
        with FlopCounterMode(display=False, custom_mapping=_EXTRA) as counter:
            call(*args, **kwargs)
        return int(counter.get_total_flops())
    except Exception:
        return 0


def _call(recording: Recording, node: fx.Node, args: Any) -> Callable[..., Any]:
    if node.op == "call_module":
        return recording.root.get_submodule(str(node.target))
    if node.op == "call_method":
        method = str(node.target)
        return lambda first, *rest, **kwargs: getattr(first, method)(*rest, **kwargs)
    assert callable(node.target)
    return node.target


def _value(recording: Recording, node: fx.Node) -> Any:
    if node.op == "get_attr":
        path = str(node.target)
        value = recording.constants.get(path)
        if value is None:
            value = recording.root
            for part in path.split("."):
                value = getattr(value, part)
        if isinstance(value, torch.Tensor) and not hasattr(value, "fake_mode"):
            return torch.empty(value.shape, dtype=value.dtype)
        return value
    meta: OpMeta = node.meta["op"]
    if meta.is_number:
        return node.meta["value"]
    if meta.shape is not None:
        return torch.empty(meta.shape, dtype=meta.dtype)
    raise ValueError(f"{node.name} is no tensor")
