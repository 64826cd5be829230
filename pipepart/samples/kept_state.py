"""The state that a step leaves for the next one: buffers that it changes, and ops that do so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx
from torch.nn.modules.batchnorm import _BatchNorm

from pipepart.recording import Recording
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import op_of
from pipepart.recording.recorded_run.intrinsics import set_attribute
from pipepart.samples.follow import assigned_path

__all__ = ["changed_buffers", "persistent_writes"]

_NORMS = ("batch_norm", "native_batch_norm")


def persistent_writes(recording: Recording) -> list[fx.Node]:
    """Return the ops that change values which the next call reads: buffers in place, attributes that get a new tensor.

    Statistics of BatchNorm layers are left out, also where a subclass updates them itself (timm): they follow
    micro-batches.
    """
    nodes = list(recording.graph.nodes)
    read = {str(node.target) for node in nodes if node.op == "get_attr"}
    buffers = [n for n in nodes if n.op == "get_attr" and not _is_norm_statistic(recording, str(n.target))]
    kept = set().union(*(op_of(node).writes for node in buffers))
    found = []
    for node in nodes:
        if node.target is set_attribute:
            found += [node] if assigned_path(node) in read else []
        elif node.op in ("call_function", "call_method") and kept & op_of(node).mutates:
            found += [node] if getattr(node.target, "__name__", "") not in _NORMS else []
    return found


def _is_norm_statistic(recording: Recording, path: str) -> bool:
    """Return whether an attribute is a running mean or variance of a BatchNorm layer, or its count of batches."""
    owner, _, name = path.rpartition(".")
    if path in recording.constants:
        return False
    layer: Any = resolve(recording.root, owner) if owner else recording.root
    return isinstance(layer, _BatchNorm) and name in ("running_mean", "running_var", "num_batches_tracked")


def changed_buffers(recording: Recording, writes: Sequence[fx.Node]) -> list[str]:
    """Return the names of the buffers that these ops change."""
    changed = set().union(*(op_of(node).mutates for node in writes))
    reads = [n for n in recording.graph.nodes if n.op == "get_attr" and op_of(n).writes & changed]
    assigned = [assigned_path(node) for node in writes if node.target is set_attribute]
    return sorted({*(str(node.target) for node in reads), *assigned})
