"""Who holds which parameters: a stage keeps its own and drops the rest to the meta device, names and order intact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipepart.capture import Chunk

__all__ = ["Ownership", "drop_foreign_parameters", "place_parameters"]


@dataclass(frozen=True)
class Ownership:
    """Stages of every parameter and buffer, by its (first) full name."""

    parameters: Mapping[str, tuple[int, ...]]
    """Parameter -> the stages that hold a copy, the first of them being its home. More than one: tied over stages."""
    buffers: Mapping[str, int]
    """Buffer -> the stage whose value is the true one (the stage that updates it)."""

    @staticmethod
    def of(root: nn.Module, chunks: Sequence[Chunk], placement: Sequence[int]) -> Ownership:
        """What no chunk uses belongs to stage 0."""
        parameters: dict[str, set[int]] = {name: set() for name, _ in root.named_parameters()}
        buffers: dict[str, int] = {name: 0 for name, _ in root.named_buffers()}
        for chunk in reversed(chunks):
            for name in chunk.parameters:
                parameters[name].add(placement[chunk.index])
            for name in chunk.buffers:
                buffers[name] = placement[chunk.index]
        return Ownership({name: tuple(sorted(stages)) or (0,) for name, stages in parameters.items()}, buffers)

    def held_by(self, stage: int) -> list[str]:
        return [name for name, stages in self.parameters.items() if stage in stages]

    def homed_at(self, stage: int) -> list[str]:
        """The parameters counted for this stage, so that each is counted once over all stages."""
        return [name for name, stages in self.parameters.items() if stages[0] == stage]

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        return {name: stages for name, stages in self.parameters.items() if len(stages) > 1}


def drop_foreign_parameters(root: nn.Module, keep: Iterable[str]) -> dict[str, nn.Parameter]:
    """Free the storage of all parameters but `keep`; returns the empty ones that stand in their place, by name.

    They are meta tensors of the same shape in the same places (ties included): names, order and optimizer groups hold.
    """
    kept = set(keep)
    hollow = {
        name: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for name, parameter in root.named_parameters()
        if name not in kept
    }
    place_parameters(root, hollow)
    return hollow


def place_parameters(root: nn.Module, new: Mapping[str, nn.Parameter]) -> None:
    """Put other parameters in the place of those with these (first) names, wherever they are tied to."""
    old = {id(parameter): new[name] for name, parameter in root.named_parameters() if name in new}
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in old:
                setattr(module, name, old[id(parameter)])
