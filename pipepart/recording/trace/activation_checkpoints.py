"""Activation checkpointing inside a model: which ops it covers, and how a recorded region is run again in backward.

The ops of a checkpointed region are recorded one by one, so that cuts may fall between them, and each remembers its
region. What is run (the whole graph, or a chunk) puts the ops of one region that follow each other back under
``torch.utils.checkpoint``: the memory that the user saved stays saved.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import checkpoint

__all__ = ["Checkpoint", "Recomputed", "regions_of", "settings_of"]

_module: Any = importlib.import_module("torch.utils.checkpoint")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpointed region of a model: the options of its ``torch.utils.checkpoint`` call."""

    options: Mapping[str, Any] = field(default_factory=dict)


_OPTIONS = tuple(
    parameter.name
    for parameter in inspect.signature(_module._checkpoint_without_reentrant_generator).parameters.values()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
)[1:]
"""The options that torch passes to its generator between the function and the arguments of the function."""


def settings_of(args: Sequence[Any]) -> Checkpoint:
    """The region of a call of torch's generator, by what follows the function among its arguments."""
    return Checkpoint(dict(zip(_OPTIONS, args)))


class Recomputed:
    """Runs a part of a graph, and runs it again in backward instead of keeping what autograd would save."""

    def __init__(self, body: Callable[..., Any], region: Checkpoint, whole: bool):
        self.body = body
        self.options = dict(region.options)
        if whole and "early_stop" in _OPTIONS:  # autocast regions must be left as they were entered
            self.options["early_stop"] = False

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.body(*args)
        return checkpoint(self.body, *args, use_reentrant=False, **self.options)


def regions_of(nodes: Iterable[fx.Node], depth: int) -> Iterator[tuple[int | None, list[fx.Node]]]:
    """Nodes in order, as runs of one region at this depth of nesting; None: outside of any.

    A run in which nothing requires a gradient saves nothing: it counts as outside.
    """
    for region, run in groupby(nodes, lambda node: _region(node, depth)):
        members = list(run)
        worth = any(node.meta["op"].requires_grad for node in members)
        yield region if worth else None, members


def _region(node: fx.Node, depth: int) -> int | None:
    regions: tuple[int, ...] = node.meta.get("checkpoint", ())
    return regions[depth] if depth < len(regions) else None
