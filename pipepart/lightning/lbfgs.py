"""LBFGS over stages. The optimizer works on all parameters as one vector, of which each stage holds a part.

All ranks run the same code of `torch.optim.LBFGS`. Its vectors are those of the stage; products and norms are sums and maxima
over all stages, in one order, so that all ranks take the same decisions and evaluate the closure together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from pipepart.recording.inputs import trees
from pipepart.runtime import StageRuntime
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import exchange_objects

__all__ = ["connect_lbfgs", "connect_lbfgs_late", "full_lbfgs_state", "load_full_lbfgs_state"]


def connect_lbfgs(optimizers: Sequence[Optimizer], runtime: StageRuntime) -> None:
    """Let each LBFGS among the new optimizers of a fit work on the parameters of this stage, also after the fit."""
    groups = runtime.groups
    for optimizer in optimizers:
        if not isinstance(optimizer, LBFGS) or groups is None or groups.mesh.stages == 1:
            continue
        held = {id(parameter): name for name, parameter in runtime.named_parameters().items()}
        own: list[torch.Tensor] = [p for p in optimizer.param_groups[0]["params"] if id(p) in held]
        counted = [runtime.ownership.parameters[held[id(p)]][0] == runtime.stage for p in own]
        if not own:  # the state of LBFGS belongs to its first parameter
            own, counted = [nn.Parameter(torch.empty(0, device=runtime.device))], [True]
        optimizer._params, optimizer._numel_cache = own, None
        optimizer._gather_flat_grad = partial(  # type: ignore[method-assign]
            _gathered, optimizer._gather_flat_grad, _vector_of(own, counted, runtime)
        )


def connect_lbfgs_late(optimizers: Sequence[Optimizer], runtime: StageRuntime) -> None:
    """As `connect_lbfgs`, for optimizers that have a state as on one device: from a checkpoint, or in their first step.

    The step goes on with the same dict.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            state = optimizer.state.pop(optimizer._params[0], None)
            connect_lbfgs([optimizer], runtime)
            if state is not None:
                state.update(_own_state(optimizer, state))
                optimizer.state[optimizer._params[0]] = state


def _gathered(gather: Callable[[], torch.Tensor], kind: Any) -> torch.Tensor:
    vector: torch.Tensor = gather().as_subclass(kind)
    return vector


def _vector_of(own: Sequence[torch.Tensor], counted: Sequence[bool], runtime: StageRuntime) -> Any:
    """A class of vectors over the parameters of all stages, each of which holds its own part.

    Parameters that several stages hold count once.
    """
    groups = runtime.groups
    assert groups is not None
    mask = torch.cat([torch.full((_size(p),), yes, device=runtime.device) for p, yes in zip(own, counted)])
    every = all(counted)

    def over_stages(value: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parts = [torch.empty(1, dtype=torch.float64, device=runtime.device) for _ in range(groups.mesh.stages)]
        with guarded(groups):
            dist.all_gather(parts, value.detach().double().reshape(1), group=groups.pipeline)
        return combine(torch.cat(parts)).to(value.dtype)

    class StageVector(torch.Tensor):
        """The part of this stage."""

        def _plain(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

        def _counted(self) -> torch.Tensor:
            return self._plain() if every else self._plain()[mask]

        def dot(self, other: Any) -> torch.Tensor:  # type: ignore[override]
            right = other.as_subclass(torch.Tensor)
            return over_stages(torch.dot(self._counted(), right if every else right[mask]), torch.sum)

        def sum(self) -> torch.Tensor:  # type: ignore[override]
            return over_stages(self._counted().sum(), torch.sum)

        def max(self) -> torch.Tensor:  # type: ignore[override]
            """The largest entry; LBFGS asks for magnitudes only."""
            plain = self._plain()
            return over_stages(plain.max() if plain.numel() else plain.new_zeros(()), torch.max)

    return StageVector


def _size(parameter: torch.Tensor) -> int:
    return 2 * parameter.numel() if torch.is_complex(parameter) else parameter.numel()


# ---- checkpoints


def full_lbfgs_state(optimizer: LBFGS, runtime: StageRuntime) -> dict[str, Any]:
    """The state dict as on one device, on rank 0; empty elsewhere. Every rank must call it."""
    everything = optimizer.param_groups[0]["params"]
    numbers = {id(p): index for index, p in enumerate(everything)}
    own = optimizer._params
    state = optimizer.state.get(own[0], {})
    groups = runtime.groups
    packed = {"params": list(range(len(everything)))}
    described = {"param_groups": [{**optimizer.param_groups[0], **packed}]}
    if groups is None or groups.mesh.stages == 1:
        return {"state": {0: trees.map_structure(_plain, dict(state))} if state else {}, **described}
    places = [(numbers.get(id(p)), _size(p)) for p in own]
    part = (places, trees.map_structure(lambda value: _cut(value, places), dict(state)))
    with guarded(groups):
        parts = exchange_objects(part, groups, inside_replica=True, target=groups.rank_of_stage(0))
    if groups.rank != 0:
        return {}
    if not state:
        return {"state": {}, **described}
    return {"state": {0: _joined([found for _, found in parts], len(everything))}, **described}


class _Cut(dict[int, torch.Tensor]):
    """The pieces of a vector, by the number of the parameter."""


def _plain(value: Any) -> Any:
    return value.detach().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


def _cut(value: Any, places: Sequence[tuple[int | None, int]]) -> Any:
    """A vector over the parameters of a stage as pieces; other values as they are."""
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return _plain(value)
    pieces = _plain(value).cpu().split([size for _, size in places])
    return _Cut({number: piece.clone() for (number, _), piece in zip(places, pieces) if number is not None})


def _joined(parts: Sequence[Any], count: int) -> Any:
    """The state of one device from those of all stages, which have the same structure."""
    first = parts[0]
    if isinstance(first, _Cut):
        pieces = {number: piece for part in reversed(parts) for number, piece in part.items()}
        return torch.cat([pieces[number] for number in range(count)])
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts], count) for key in first}
    if isinstance(first, list):
        return [_joined([part[index] for part in parts], count) for index in range(len(first))]
    return first


def load_full_lbfgs_state(optimizer: LBFGS, state: dict[str, Any]) -> None:
    """Load the part of a whole state dict that belongs to the parameters on this rank."""
    values = _own_state(optimizer, state["state"].get(0, {}))
    optimizer.load_state_dict({**state, "state": {}})
    if values:
        optimizer.state[optimizer._params[0]] = values


def _own_state(optimizer: LBFGS, state: dict[str, Any]) -> dict[str, Any]:
    """The part of the state on one device that belongs to the parameters on this rank."""
    everything = optimizer.param_groups[0]["params"]
    own = {id(p) for p in optimizer._params}
    sizes, here = [_size(p) for p in everything], [id(p) in own for p in everything]
    whole = sum(sizes)

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.numel() != whole:
            return value
        pieces = [piece for piece, yes in zip(value.split(sizes), here) if yes]
        vector = torch.cat(pieces) if pieces else value[:0].clone()
        first = optimizer._params[0]
        return vector.to(device=first.device, dtype=first.dtype).as_subclass(type(optimizer._gather_flat_grad()))

    values: dict[str, Any] = trees.map_structure(part, dict(state))
    return values
