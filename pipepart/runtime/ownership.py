"""Who holds which parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pipepart.recording import Chunk

__all__ = ["Ownership"]


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
