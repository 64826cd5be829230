"""Measured costs on disk, so that the same step on the same device is measured once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from pipepart.cost.device_memory import stays_on_host
from pipepart.cost.op_costs import OpCosts
from pipepart.cost.profile import NO_MEMORY, profile
from pipepart.cost.this_machine import processor
from pipepart.cost.timing import Context, device_under, whole_step
from pipepart.devices import computes_on_host, device_name
from pipepart.errors import PipepartError
from pipepart.files import keep_json, load_json
from pipepart.machine import cache_folder
from pipepart.recording import Recording

__all__ = ["profiled"]

_VERSION = 8
"""Version of the measurement method; older measurements are made again."""
_TOLERANCE = 0.15
"""Share of the time of a step by which a kept measurement may differ from the present one."""
_NOISE = 0.2e-3
"""Additional seconds by which a kept measurement may differ: the times of very short steps vary most."""


def profiled(
    recording: Recording,
    leaves: Sequence[Any],
    context: Context = nullcontext,
    variant: str = "",
    agree: Callable[[bool], bool] | None = None,
) -> OpCosts:
    """Return `profile` of a recording, or the kept result for the same graph, shapes, precision, device and threads.

    `variant` names the precision. With `agree`, a kept result is compared with a few steps, since a result that was
    measured on a busy machine would make every later plan worse. A result that holds is scaled to the present speed.
    `agree` is called with whether the kept result holds on this rank, and returns whether it is used: on all ranks or none.
    """
    path = cache_folder() / "profiles" / f"{_key(recording, leaves, variant)}.json"
    found = _kept(path, tuple(node.name for node in recording.ops))
    now = 0.0
    whole = not stays_on_host(recording.root, device_under(leaves))
    if found is not None and agree is not None and whole:
        with suppress(torch.OutOfMemoryError):
            now = sum(whole_step(recording, leaves, context))
    holds = found is not None and (not whole or _holds(found, now))
    good = agree is None or agree(holds)  # all ranks take part in the vote
    if good and found is not None:
        return found.faster(found.step / now) if now and found.step else found
    costs = profile(recording, leaves, context)
    if not any(note.startswith(NO_MEMORY) for note in costs.notes):
        keep_json(path, dataclasses.asdict(costs))
    return costs


def _holds(kept: OpCosts, now: float) -> bool:
    return abs(kept.step - now) <= _TOLERANCE * now + _NOISE


def _key(recording: Recording, leaves: Sequence[Any], variant: str) -> str:
    shapes = [(list(v.shape), str(v.dtype), v.device.type) if isinstance(v, torch.Tensor) else repr(v) for v in leaves]
    where = next(
        (v.device for v in (*leaves, *recording.root.parameters()) if isinstance(v, torch.Tensor)), torch.device("cpu")
    )
    device = processor() if computes_on_host(where) else device_name(where)
    parts = [_VERSION, recording.hash, shapes, variant, device, torch.__version__, torch.get_num_threads()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _kept(path: Path, names: tuple[str, ...]) -> OpCosts | None:
    """Return kept costs of these ops. A file that is absent, damaged or of another version is a miss."""
    try:
        costs = OpCosts.read(load_json(path))
    except PipepartError:
        return None
    return costs if costs.names == names else None
