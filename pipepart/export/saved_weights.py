"""The weights of a checkpoint, plain or sharded, read without running code, and put into the module that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipepart.errors import ConfigError
from pipepart.lightning.checkpoint_files import load_file, verify
from pipepart.lightning.sharded import bring_back, is_sharded, load_whole_model, verify_shards
from pipepart.values import shortened

__all__ = ["find_checkpoint", "put_weights", "read_checkpoint"]

_LAST = ("checkpoints/last.ckpt", "last.ckpt")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: a file, a sharded folder, or the last checkpoint of the folder of a run."""
    bring_back(path)
    if path.is_file() or is_sharded(path):
        return path
    if not path.exists():
        raise ConfigError(f"there is no checkpoint {path}; expected a file, a sharded folder or the folder of a run")
    for name in _LAST:
        if (path / name).is_file() or is_sharded(path / name):
            return path / name
    raise ConfigError(
        f"{path} is a folder without a checkpoint: expected a sharded checkpoint, or {' or '.join(_LAST)}"
    )


def read_checkpoint(path: Path, trusted: bool = False) -> dict[str, Any]:
    """The checkpoint as a mapping with `state_dict`, after its digests were compared; without the states of optimizers.

    With `trusted` it may hold objects of other classes, and reading them can run code.
    """
    weights_only = False if trusted else None
    if is_sharded(path):
        verify_shards(path)
        return load_whole_model(path, weights_only)
    verify(path)
    found = load_file(path, weights_only, "cpu")
    if isinstance(found, Mapping) and found and all(isinstance(value, torch.Tensor) for value in found.values()):
        return {"state_dict": dict(found)}  # of torch.save(model.state_dict(), path)
    if not isinstance(found, Mapping) or not isinstance(found.get("state_dict"), Mapping):
        raise ConfigError(
            f"{path} is not a checkpoint: expected a file of Lightning or of torch.save(model.state_dict(), ...), got "
            f"a {type(found).__name__} without 'state_dict'"
        )
    return {key: value for key, value in found.items() if key != "optimizer_states"}


def put_weights(module: nn.Module, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Load the weights of a checkpoint into a module, or into the part of the checkpoint's module that it is."""
    state = dict(checkpoint["state_dict"])
    own = set(module.state_dict())
    prefix = _prefix(own, set(state))
    if prefix is None:
        _refuse(module, own, set(state), path)
    try:
        module.load_state_dict(_part(state, prefix or ""))
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise ConfigError(
            f"the weights of {path} do not fit {type(module).__name__}: {' '.join(lines[1:3]).strip() or lines[0]}. Use the "
            "configuration or the class with which the checkpoint was written"
        ) from error


def _part(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _prefix(own: set[str], saved: set[str]) -> str | None:
    """What the names of the checkpoint have before those of the module; None if the names do not belong together.

    A module may leave out names of its state dict and load it nevertheless (adapters), so one common name is enough.
    """
    if own & saved or not own:
        return ""
    first = min(own)
    found = {name.removesuffix(first) for name in saved if name.endswith(f".{first}")}
    fitting = [prefix for prefix in sorted(found) if {f"{prefix}{name}" for name in own} <= saved]
    return fitting[0] if len(fitting) == 1 else None


def _refuse(module: nn.Module, own: set[str], saved: set[str], path: Path) -> None:
    raise ConfigError(
        f"the weights of {path} are not those of {type(module).__name__}: it has {_some(own)}, and the checkpoint has "
        f"{_some(saved)}. Use the configuration or the class with which the checkpoint was written"
    )


def _some(names: set[str]) -> str:
    shown = ", ".join(shortened(name) for name in sorted(names)[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "no weights"
