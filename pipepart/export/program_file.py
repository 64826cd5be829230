"""A network as a program of `torch.export` (`.pt2`), which `torch.export.load` reads without the code of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pipepart.export.narrow_weights import BITS, with_narrow_weights
from pipepart.export.network import Network

__all__ = ["open_program", "write_program"]


def write_program(network: Network, target: Path, quantize: str | None) -> None:
    """Write the program. Weights in fewer bits are made whole where the program uses them."""
    if quantize is not None:
        network = replace(network, function=with_narrow_weights(network.function, BITS[quantize]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(network.program(), target)


def open_program(network: Network, target: Path) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    loaded = torch.export.load(target).module()

    def run(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(loaded(*values))

    return run
