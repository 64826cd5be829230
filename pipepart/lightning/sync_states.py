"""Checkpoints of replicas that make updates of their own (`sync="local"`, `"ring"`).

The model of a checkpoint is the mean of the replicas, and its optimizer states are those of replica 0: any other run loads
them. Under `pipepart_sync` there is what a run in the same mode continues with:

```
mode                    its name
states                  of the exchange, by parameter: the place in the round, the outer optimizer
replicas.R.parameters   of replica R by name, if replicas differ
replicas.R.optimizers   states of replica R > 0 by optimizer and parameter number
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pipepart.lightning.optimizers import gather_parts, load_full_optimizer_state, own_optimizer_state
from pipepart.recording.inputs import trees
from pipepart.runtime import StageRuntime

__all__ = ["add_sync_states", "load_sync_states"]

_KEY = "pipepart_sync"


def add_sync_states(checkpoint: dict[str, Any], optimizers: Sequence[Optimizer], runtime: StageRuntime | None) -> None:
    """Add the states of replicas to a checkpoint that has states of optimizers. Every rank must call it."""
    if runtime is None or runtime.parameters.loose is None or "optimizer_states" not in checkpoint:
        return
    loose, groups = runtime.parameters.loose, runtime.groups
    assert groups is not None
    states = gather_parts(
        {(key, name): value for key, found in loose.state_dict().items() for name, value in found.items()}, runtime
    )
    own: dict[tuple[int, str, Any], Any] = {}
    if not loose.in_step:
        own = {(groups.replica, "parameters", name): values for name, values in loose.own_values.items()}
    for number, optimizer in enumerate(optimizers if groups.replica else ()):
        found = own_optimizer_state(optimizer, runtime).get("state", {})
        own.update({(groups.replica, "optimizers", (number, index)): state for index, state in found.items()})
    own = trees.map_structure(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, own)
    gathered = gather_parts(own, runtime, replicas=True)
    if states is None or gathered is None:
        return
    content: dict[str, Any] = {
        "mode": loose.mode,
        "states": {},
        "replicas": [_nothing() for _ in range(groups.mesh.replicas)],
    }
    for (key, name), value in states.items():
        content["states"].setdefault(key, {})[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    for (replica, kind, where), value in gathered.items():
        content["replicas"][replica].setdefault(kind, {})[where] = value
    checkpoint[_KEY] = content


def _nothing() -> dict[str, Any]:
    return {"parameters": {}, "optimizers": {}}


def load_sync_states(checkpoint: Any, optimizers: Sequence[Optimizer], runtime: StageRuntime | None) -> None:
    """Continue where the replicas of a checkpoint were, after its model and its optimizers were loaded.

    With another number of replicas each begins with the mean, and with the optimizer states of replica 0.
    """
    if runtime is None or runtime.parameters.loose is None:
        return
    loose, groups = runtime.parameters.loose, runtime.groups
    assert groups is not None
    loose.begin_anew()
    content = checkpoint.get(_KEY)
    if content is None or content["mode"] != loose.mode:
        return
    loose.load_state_dict(content["states"])
    if len(content["replicas"]) != groups.mesh.replicas:
        return
    own, named = content["replicas"][groups.replica], runtime.named_parameters()
    with torch.no_grad():
        for name, values in own["parameters"].items():
            if name in named:
                named[name].copy_(values)
    for number, optimizer in enumerate(optimizers if groups.replica else ()):
        state = {index: found for (which, index), found in own["optimizers"].items() if which == number}
        load_full_optimizer_state(optimizer, {**checkpoint["optimizer_states"][number], "state": state}, runtime)
