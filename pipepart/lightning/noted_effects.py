"""Effects of a step as values: what it logs, keeps, sets and says, and the outputs of the graph that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipepart.lightning.follows import Follows
from pipepart.lightning.metrics import Later
from pipepart.recording.inputs import trees

__all__ = ["Effect", "Effects"]


@dataclass(eq=False)
class Effect:
    """One effect of a step."""

    kind: str
    """"log", "set", "number" (computed from others), "outward" (a print, a call of a logger), a method of a container
    ("append", "extend", "setitem", "setdefault", "add", ...; "call" for others), a method of a metric ("forward", "update",
    "compute", "reset"), or "configure": an attribute of a metric is set."""
    target: str
    """The attribute or the metric, as a path from the module, or the logged name."""
    ordinal: int
    """The number of the effect in its step."""
    tree: trees.Tree = trees.LEAF
    leaves: list[Any] = field(default_factory=list)
    """The leaves of the value: constants and `Later`s; None where the graph computes the value."""
    options: dict[str, Any] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    """Position of a computed leaf -> index of the output of the graph."""
    follows: dict[int, Follows] = field(default_factory=dict)
    """Position of a computed leaf -> how its value follows the number of samples."""

    @property
    def on_metric(self) -> bool:
        return self.kind in ("forward", "update", "compute", "reset", "configure")

    @property
    def uses_metric(self) -> bool:
        return self.on_metric or "metric" in self.options

    @property
    def is_mean(self) -> bool:
        """Whether the effect logs a value with the reduction "mean", the default."""
        return self.kind == "log" and self.options.get("reduce_fx", "mean") in ("mean", "avg", torch.mean)


@dataclass(frozen=True, eq=False)
class Effects:
    """All effects of a recorded step, in order."""

    all: tuple[Effect, ...]
    returned: Mapping[int, Later]
    """Leaves of the result of the step that are values of metrics."""
    separate: frozenset[int]
    """Outputs of the graph that the runtime must not merge, since an effect needs those of all micro-batches."""
    averaged: frozenset[int] = frozenset()
    """Outputs of the graph that Lightning averages over replicas (`sync_dist=True`)."""
    hidden: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that are in no registry of modules, by path."""
    constants: Mapping[int, Any] = field(default_factory=dict)
    """Values of effects that are equal in every step, by the number of the effect."""
    checked: bool = False
    """Whether the batch check has shown that values of one shape for all micro-batches are equal, or means over samples."""

    @property
    def are_made(self) -> bool:
        """Whether the last stage makes values of the outputs: it feeds metrics, or merges micro-batches."""
        return bool(self.separate) or any(effect.uses_metric for effect in self.all)

    def metrics(self, module: nn.Module) -> dict[str, Any]:
        """The metrics that the step uses, by path."""
        paths = {e.target if e.on_metric else e.options["metric"] for e in self.all if e.uses_metric}
        return {path: self.hidden[path] if path in self.hidden else module.get_submodule(path) for path in paths}

    @property
    def reduced_otherwise(self) -> frozenset[int]:
        """Outputs that are logged with another reduction than a mean over samples (a sum, a maximum)."""
        logs = (e for e in self.all if e.kind == "log" and e.options.get("reduce_fx", "mean") != "mean")
        return frozenset(index for effect in logs for index in effect.outputs.values())

    @property
    def logged(self) -> dict[int, str]:
        """The names under which outputs are logged."""
        logs = (effect for effect in self.all if effect.kind == "log")
        return {index: effect.target for effect in logs for index in effect.outputs.values()}
