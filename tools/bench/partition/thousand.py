"""A 96-layer GPT of 175 billion parameters on 1,024 devices, everything auto: captured on the meta device, no process."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["thousand"]

_LAYERS, _WIDTH, _HEADS, _VOCABULARY, _CONTEXT = 96, 12288, 96, 50304, 2048


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from recipes.gpt import GPT

        self.model = GPT(_VOCABULARY, _CONTEXT, _WIDTH, _LAYERS, _HEADS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())


def thousand(devices: int = 1024, batch: int = 1536, cluster: str = "a100_80") -> str:
    """The plan as a table, and the seconds that it took with the capture."""
    from pipepart.planning import plan

    started = time.perf_counter()
    with torch.device("meta"):
        module = _Loss()
        example = tuple(torch.zeros(2, _CONTEXT, dtype=torch.long) for _ in range(2))
    found = plan(module, example, cluster=cluster, devices=devices, batch_size=batch, dtype="bfloat16")
    seconds = time.perf_counter() - started
    parameters = sum(parameter.numel() for parameter in module.parameters())
    lines = found.describe().splitlines()
    summary = [
        line for line in lines if line.split(" ")[0] in ("mesh", "schedule", "predicted", "bound", "split", "memory")
    ]
    return "\n".join(
        [
            *summary,
            f"{parameters / 1e9:.0f} billion parameters, {devices} devices: capture and plan {seconds:.1f} s",
        ]
    )
