"""Optimizers over a model of which each rank holds a part: their states together are those of one device."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded

__all__ = ["full_optimizer_state", "load_full_optimizer_state"]


def full_optimizer_state(optimizer: Optimizer, runtime: StageRuntime) -> dict[str, Any]:
    """The state dict as one device would have it, on rank 0; empty elsewhere. Every rank must call it.

    Parameters of other stages are in the groups too (on the meta device), so the numbering is the same everywhere.
    """
    state = optimizer.state_dict()
    groups = runtime.groups
    if groups is None:
        return state
    with guarded(groups):
        parts: list[Any] | None = [None] * groups.mesh.stages if groups.stage == 0 else None
        dist.gather_object(state["state"], parts, groups.rank_of_stage(0), group=groups.pipeline)
    if groups.rank != 0 or parts is None:
        return {}
    merged: dict[int, Any] = {}
    for part in parts:
        for index, value in part.items():
            merged.setdefault(index, value)
    return {**state, "state": dict(sorted(merged.items()))}


def load_full_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Take the part of a whole state dict that belongs to parameters on this rank."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = {index: value for index, value in state["state"].items() if not parameters[int(index)].is_meta}
    optimizer.load_state_dict({**state, "state": own})
