"""Measured costs on disk, so that the same step on the same device is measured once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from pipepart.cost.op_costs import OpCosts
from pipepart.cost.profile import profile
from pipepart.cost.timing import Context, whole_step
from pipepart.machine import cache_folder
from pipepart.recording import Recording

__all__ = ["profiled"]

_VERSION = 8
"""Of what a measurement means: older ones are measured again."""

_TOLERANCE = 0.15
"""What was measured before may differ from now by this part,"""
_NOISE = 0.2e-3
"""and by these seconds: the shortest steps are never the same twice."""


def profiled(
    recording: Recording,
    leaves: Sequence[Any],
    context: Context = nullcontext,
    variant: str = "",
    use_cache: bool = True,
    agree: Callable[[bool], bool] | None = None,
) -> OpCosts:
    """`profile`, or what it gave before for the same graph, shapes, `variant` (of precision), device and threads.

    With `agree`, what was kept is held against a few steps of now: measured on a busy machine, it would lead to a bad
    plan for ever. Where it holds, the shares of the ops are those that were kept, and the whole is that of now. `agree`
    gets whether it holds here, and says whether it shall be used (on all ranks or on none).
    """
    path = cache_folder() / "profiles" / f"{_key(recording, leaves, variant)}.json"
    if use_cache:
        found = _read(path)
        if found is not None and found.names != tuple(node.name for node in recording.ops):
            found = None
        good, now = found is not None, 0.0
        if agree is not None:
            now = sum(whole_step(recording, leaves, context)) if found is not None else 0.0
            good = agree(found is not None and _holds(found, now))
        if good and found is not None:
            return found.faster(_step(found) / now) if now and _step(found) else found
    costs = profile(recording, leaves, context)
    if use_cache:
        _write(path, costs)
    return costs


def _holds(kept: OpCosts, now: float) -> bool:
    return abs(_step(kept) - now) <= _TOLERANCE * now + _NOISE


def _step(costs: OpCosts) -> float:
    return sum(costs.forward) + sum(costs.backward_input) + sum(costs.backward_weight)


def _key(recording: Recording, leaves: Sequence[Any], variant: str) -> str:
    shapes = [(list(v.shape), str(v.dtype), v.device.type) if isinstance(v, torch.Tensor) else repr(v) for v in leaves]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    parts = [_VERSION, recording.hash, shapes, variant, device, torch.__version__, torch.get_num_threads()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """The model of the processor; `platform.processor` is empty on many Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _read(path: Path) -> OpCosts | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
        fields["savers"] = tuple(tuple(ops) for ops in fields["savers"])
        return OpCosts(**fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None  # absent, or written by another version: measure again


def _write(path: Path, costs: OpCosts) -> None:
    """A cache that cannot be written costs time, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(dataclasses.asdict(costs)))
        os.replace(beside, path)
    except OSError:
        return
