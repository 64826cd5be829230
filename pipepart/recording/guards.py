"""Decide from the sizes and numbers of a batch alone whether a recording holds for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.recording import GuardError
from pipepart.recording.trace import intrinsics

__all__ = ["failing_check"]


def failing_check(graph: fx.Graph, leaves: Sequence[Any]) -> str | None:
    """The message of the first check that fails, among those that depend only on sizes and numbers of the inputs."""
    known: dict[fx.Node, Any] = {}
    rest = iter(leaves)
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(rest)
        elif node.op in ("call_function", "call_method") and node.all_input_nodes:
            if any(source not in known for source in node.all_input_nodes):
                continue
            if node.target is not intrinsics.check and not node.meta["op"].is_number:
                continue
            args = fx.map_arg(node.args, lambda source: known[source])
            if isinstance(args[0], torch.Tensor) and node.target not in ("size", "numel", "stride"):
                continue
            try:
                call = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
                known[node] = call(*args[1:]) if node.op == "call_method" else call(*args)
            except GuardError as error:
                return str(error)
    return None
