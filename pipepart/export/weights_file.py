"""The weights of a network as one safetensors file, in full or in fewer bits, and the reader of such files."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from pipepart.errors import ConfigError
from pipepart.export.narrow_weights import BITS, Codes, can_be_narrow, narrowed
from pipepart.export.network import Network

__all__ = ["open_weights", "read_weights", "write_weights"]

_UNREADABLE = (
    SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError,
)  # fmt: skip
"""What reading a file with any contents can raise."""
_TIED, _NARROW = "pipepart.tied", "pipepart.narrow"


def write_weights(network: Network, target: Path, quantize: str | None) -> None:
    """Write the state dict of the network's module; tensors with several names once."""
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    narrow: dict[str, Any] = {}
    firsts: dict[int, str] = {}
    parameters = {name for name, _ in network.module.named_parameters(remove_duplicate=False)}
    for name, value in network.module.state_dict(keep_vars=True).items():
        first = firsts.setdefault(id(value), name)
        if first != name:
            tied[name] = first
        elif quantize is not None and name in parameters and can_be_narrow(value):
            found = narrowed(value, BITS[quantize])
            tensors[f"{name}.codes"], tensors[f"{name}.scale"] = found.codes.contiguous(), found.scale.contiguous()
            narrow[name] = {"bits": found.bits, "shape": list(found.shape)}
        else:
            tensors[name] = value.detach().clone().contiguous()
    metadata = {"format": "pt", _TIED: json.dumps(tied), _NARROW: json.dumps(narrow)}
    save_file(tensors, target, metadata=metadata)


def read_weights(file: str | Path) -> dict[str, torch.Tensor]:
    """The state dict in a file of `pipepart export --to safetensors`: every name, and weights of fewer bits as numbers."""
    if not Path(file).is_file():  # a pipe would be waited for
        raise ConfigError(f"there is no file {file} to read weights from")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tied, narrow = (json.loads(metadata.get(key, "{}")) for key in (_TIED, _NARROW))
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for name, kind in narrow.items():
            codes, scale = stored.pop(f"{name}.codes"), stored.pop(f"{name}.scale")
            stored[name] = Codes(codes, scale, tuple(kind["shape"]), int(kind["bits"])).weight()
        return {**stored, **{name: stored[first] for name, first in tied.items()}}
    except _UNREADABLE as error:
        raise ConfigError(f"{file} is not a readable file of weights: {type(error).__name__}: {error}") from error


def open_weights(network: Network, target: Path) -> nn.Module:
    """The function of the network with weights that come from the file alone."""
    function = deepcopy(network.function)
    part: Any = function.network
    with torch.no_grad():
        for value in part.state_dict(keep_vars=True).values():
            value.fill_(0)  # no value of the original may be left
    part.load_state_dict(read_weights(target))
    return function
