"""Options of the strategy: those of a pipeline, and those of Lightning runs only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pipepart.errors import ConfigError
from pipepart.options import Options, words_of
from pipepart.values import shortened

__all__ = ["StrategyOptions"]


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(Options):
    """All options of `PipelineStrategy`."""

    example_batch: Any = field(default=None, repr=False, compare=False)
    """The batch to record with. None: the first batch."""
    sharded: bool = False
    """Whether each stage writes its own part of a checkpoint. False: one plain file."""
    after: Literal["whole", "parts"] = "whole"
    """State of the module after a run: ``whole`` on every rank, or ``parts``, where each rank keeps its stage."""

    def __post_init__(self) -> None:
        if self.after not in words_of(StrategyOptions, "after"):
            raise ConfigError(
                f"after={shortened(self.after)} is not known: expected 'whole' (after a run every rank has the whole "
                "module) or 'parts' (each rank keeps only the values of its stage)."
            )
        super().__post_init__()
