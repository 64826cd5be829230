"""What a sharded checkpoint holds: tensors by name, which the stages write, and the rest, which rank 0 writes."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["REST", "rest_of", "tensors_of"]

REST = "rest.pt"

Plain = dict[tuple[int, int, str], Any]


def tensors_of(checkpoint: dict[str, Any], model: bool) -> tuple[dict[str, torch.Tensor], Plain]:
    """The tensors of the `model`, if this rank writes it, and of the optimizers, and the other values of the optimizers."""
    tensors = {f"model.{name}": value for name, value in checkpoint["state_dict"].items()} if model else {}
    plain: Plain = {}
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        for index, values in state.get("state", {}).items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{number}.{index}.{key}"] = value.detach()
                else:
                    plain[(number, int(index), key)] = value
    return tensors, plain


def rest_of(checkpoint: dict[str, Any], every_plain: Plain | None) -> dict[str, Any]:
    """The checkpoint without its tensors, with the plain values of the optimizers of all stages."""
    rest = {**checkpoint, "state_dict": {}, "pipepart_plain_state": every_plain}
    rest["optimizer_states"] = [
        {**state, "state": {}} if "state" in state else state for state in checkpoint.get("optimizer_states", [])
    ]
    return rest
