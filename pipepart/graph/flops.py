"""Forward FLOPs of each op by torch's own counter, on fake tensors: nothing is computed."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch.utils.flop_counter import FlopCounterMode

from pipepart.capture.recording import Recording

__all__ = ["op_flops"]


class _Counter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=True)
        self.flops: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        counter = FlopCounterMode(display=False)
        with counter:
            out = super().run_node(n)
        self.flops[n.name] = int(counter.get_total_flops())
        return out


def op_flops(recording: Recording) -> dict[fx.Node, int]:
    """Forward FLOPs of the ops, up to the first that cannot run without data (those after it count as 0)."""
    return {}
