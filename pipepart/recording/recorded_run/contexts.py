"""Contexts that ops run in: gradient settings of the process, regions of activation checkpointing, lines of the user.

Settings such as the allowed attention kernels are read at every op and kept for it, as gradient mode and autocast are.

The ops of a checkpointed region are recorded one by one, so that cuts may fall between them, and each op keeps its
region. An executable graph or chunk puts consecutive ops of one region back under ``torch.utils.checkpoint``, so the
memory that the user saved stays saved.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.fx as fx
from torch.utils.checkpoint import checkpoint

from pipepart.devices import ATTENTION_SWITCHES, autocast_types
from pipepart.recording.op import op_of

__all__ = [
    "Checkpoint",
    "Recomputed",
    "autocast_state",
    "outside_rng",
    "regions_of",
    "set_switches",
    "settings_of",
    "switches",
    "user_line",
]

_module: Any = importlib.import_module("torch.utils.checkpoint")
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    *ATTENTION_SWITCHES,
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
)


def switches() -> tuple[Any, ...]:
    """Return the current settings of the process."""
    return tuple(read() for read, _ in _SWITCHES)


def set_switches(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Switch to these settings and return the settings before."""
    before = switches()
    for (_, write), old, new in zip(_SWITCHES, before, values):
        if old != new:
            write(new)
    return before


def autocast_state() -> tuple[Any, ...]:
    """Return the device and dtype of each autocast that is on."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in autocast_types() if torch.is_autocast_enabled(device)
    )


def outside_rng() -> tuple[Any, ...]:
    """Return the states of the random generators outside torch: those of Python and numpy."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, *rest = numpy_state
    return random.getstate(), name, keys.tobytes(), position, tuple(rest)


_TORCH = str(torch.__path__[0])
_HERE = __file__.rpartition("/recording/")[0] + "/"


def user_line() -> str:
    """Return file and line of the innermost frame that belongs neither to torch nor to this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        short = _user_files.get(name)
        if short is None:
            ours = name.startswith((_TORCH, _HERE, "<"))
            short = _user_files[name] = "" if ours else name.rpartition("/")[2]
        if short:
            return f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_user_files: dict[str, str] = {}
"""Short names of files seen in frames; empty for files of torch and of this package."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpointed region of a model: the options of its ``torch.utils.checkpoint`` call."""

    options: Mapping[str, Any] = field(default_factory=dict)


_OPTIONS = tuple(
    parameter.name
    for parameter in inspect.signature(_module._checkpoint_without_reentrant_generator).parameters.values()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
)[1:]
"""Options that torch passes to its generator between the function and the arguments of the function."""


def settings_of(args: Sequence[Any]) -> Checkpoint:
    """Return the region of a call of torch's generator, from the arguments after the function."""
    return Checkpoint(dict(zip(_OPTIONS, args)))


class Recomputed:
    """Part of a graph that is run again in backward, so that autograd saves nothing inside it."""

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
    """Yield consecutive nodes of one region at this depth of nesting, in order; None stands for no region.

    A region in which no node requires a gradient saves nothing, and its nodes count as outside.
    """
    for region, run in groupby(nodes, lambda node: _region(node, depth)):
        members = list(run)
        yield region if any(op_of(node).requires_grad for node in members) else None, members


def _region(node: fx.Node, depth: int) -> int | None:
    regions = op_of(node).checkpoint
    return regions[depth] if depth < len(regions) else None
