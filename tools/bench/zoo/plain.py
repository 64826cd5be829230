"""Hand-written models, each with something that tracers and pipelines get wrong."""

from __future__ import annotations

from tools.bench.zoo import plain_blocks, plain_state, plain_values

__all__ = ["ARCHITECTURES"]

ARCHITECTURES = {**plain_blocks.MODELS, **plain_values.MODELS, **plain_state.MODELS}
