"""Guards of the Python state: how many a model has, and what looking at them before each step takes.

python -m tools.bench.state
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from pipepart.recording import Recording, record
from pipepart.recording.model_state.reads import Reads


class Annealed(nn.Module):
    """A small network with a few plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.beta, self.use_aux, self.hp, self.cfg = 0.1, True, SimpleNamespace(a=1.0, b=2.0), {"x": 1.0, "y": 2}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        loss = h.pow(2).mean() * self.beta + self.hp.a * self.cfg["x"]
        return loss + h.abs().mean() if self.use_aux else loss


def _gpt2() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=64, n_head=4, vocab_size=256, n_positions=64))
    return model, (torch.randint(0, 256, (4, 16)),)


def _best(function: Callable[[], Any], times: int) -> float:
    """Seconds of the processor, the best of some times."""
    taken = []
    for _ in range(times):
        started = time.process_time()
        function()
        taken.append(time.process_time() - started)
    return min(taken)


def _recorded(model: nn.Module, args: tuple[Any, ...], guarded: bool) -> tuple[Recording, float]:
    without = patch.object(Reads, "collecting", lambda self, variables: nullcontext())
    with nullcontext() if guarded else without:
        recording = record(model, args)
        return recording, _best(lambda: record(model, args), 3)


def main() -> None:
    cases = {"annealed MLP": (Annealed(), (torch.randn(8, 16),)), "GPT-2, 12 layers": _gpt2()}
    print(f"{'model':20} {'guards':>7} {'check':>10} {'record':>10} {'without':>10}")
    for name, (model, args) in cases.items():
        _, plain = _recorded(model, args, False)
        recording, watched = _recorded(model, args, True)
        check = _best(recording.guards.changes, 2000)
        print(
            f"{name:20} {len(recording.guards):7} {check * 1e6:7.1f} us {watched * 1e3:7.1f} ms {plain * 1e3:7.1f} ms"
        )


if __name__ == "__main__":
    main()
