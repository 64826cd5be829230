"""Forward FLOPs by torch's own formulas, counted while a recording is replayed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FlopMode"]

aten: Any = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    count: Any = flop_counter.sdpa_flop_count
    return int(count(query.shape, key.shape, value.shape))


def _recurrent_layer(inputs: Any, weight: Any, recurrent: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    steps = inputs.numel() // inputs.shape[-1]
    return int(2 * steps * (weight.numel() + recurrent.numel()))


_FORMULAS: dict[Any, Any] = {
    **flop_counter.flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.mkldnn_rnn_layer: _recurrent_layer,
}
"""torch's formulas, and what it has none for: the fused attention and the recurrent layers of the CPU."""


class FlopMode(TorchDispatchMode):
    """Adds up the FLOPs of what runs inside: matrix products, convolutions, attention; all else counts as 0."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
        if formula is None and torch.is_inference_mode_enabled():  # there, ops made of others come undivided
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out
