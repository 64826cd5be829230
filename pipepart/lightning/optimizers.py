"""States of optimizers on a model of which each rank holds a part. Together they are the state on one device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from pipepart.lightning.lbfgs import full_lbfgs_state, load_full_lbfgs_state
from pipepart.recording.inputs import trees
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import exchange_objects

__all__ = [
    "full_optimizer_state",
    "gather_parts",
    "gather_states",
    "load_full_optimizer_state",
    "own_optimizer_state",
    "own_part",
    "states_to_host",
]


def own_optimizer_state(optimizer: Optimizer, runtime: StageRuntime) -> dict[str, Any]:
    """The state dict with the states of the parameters that this rank updates only.

    Parameters of other stages are in the groups too (on the meta device), so parameters have equal numbers everywhere.
    """
    state = optimizer.state_dict()
    if "state" not in state:  # no optimizer: `configure_optimizers` has returned None
        return state
    return {**state, "state": own_part(optimizer, state["state"], runtime)}


def own_part(optimizer: Optimizer, states: dict[int, Any], runtime: StageRuntime | None) -> dict[int, Any]:
    """The states of the parameters that this rank updates, by parameter number. Some optimizers make states for all."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    others: Collection[int] = runtime.parameters.updated_elsewhere if runtime is not None else ()
    return {
        int(index): value
        for index, value in states.items()
        if not parameters[int(index)].is_meta
        and id(parameters[int(index)]) not in others
        and not _without_values(value)
    }


def _without_values(state: Any) -> bool:
    """Whether a state was made for a parameter of another stage. After a run such a parameter can have values again."""
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in trees.leaves_of(state))


def states_to_host(optimizers: Sequence[Optimizer]) -> None:
    """Move the states to host memory, as Lightning does after a run. States for other stages have no values."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not _without_values(state):
                optimizer.state[parameter] = trees.moved(state, "cpu")


def gather_states(part: dict[Any, Any], runtime: StageRuntime) -> dict[Any, Any] | None:
    """The union of optimizer states by parameter of all ranks, on rank 0; None elsewhere. Every rank must call it."""
    return gather_parts(part, runtime, replicas=runtime.parameters.divides_updates)


def gather_parts(part: dict[Any, Any], runtime: StageRuntime, replicas: bool = False) -> dict[Any, Any] | None:
    """The union of the parts of all stages, on rank 0; None elsewhere. Every rank must call it.

    `replicas`: replicas have different parts, too.
    """
    groups = runtime.groups
    if groups is None:
        return part
    with guarded(groups):
        target = 0 if replicas else groups.rank_of_stage(0)
        parts = exchange_objects(part, groups, inside_replica=not replicas, target=target)
    if groups.rank != 0:
        return None
    merged: dict[Any, Any] = {}
    for found in parts:
        for key, value in found.items():
            merged.setdefault(key, value)
    return merged


def full_optimizer_state(optimizer: Optimizer, runtime: StageRuntime) -> dict[str, Any]:
    """The state dict as on one device, on rank 0; empty elsewhere. Every rank must call it."""
    if isinstance(optimizer, LBFGS):
        return full_lbfgs_state(optimizer, runtime)
    state = own_optimizer_state(optimizer, runtime)
    if "state" not in state:
        return state
    merged = gather_states(state["state"], runtime)
    return {} if merged is None else {**state, "state": dict(sorted(merged.items()))}


def load_full_optimizer_state(optimizer: Optimizer, state: dict[str, Any], runtime: StageRuntime | None = None) -> None:
    """Load the part of a whole state dict that belongs to the parameters that this rank updates. None: to all on this rank."""
    if "state" not in state:
        optimizer.load_state_dict(state)
        return
    if isinstance(optimizer, LBFGS):
        load_full_lbfgs_state(optimizer, state)
        return
    own = own_part(optimizer, state["state"], runtime)
    # Copies, since the loaded tensors may be mapped from the file.
    own = trees.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, own)
    optimizer.load_state_dict({**state, "state": own})
