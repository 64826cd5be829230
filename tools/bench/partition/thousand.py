"""Large models on large clusters, everything auto: captured on the meta device, planned without a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from pipepart.planning import Plan, plan

__all__ = ["CASES", "LargeCase", "plan_case", "thousand"]


@dataclass(frozen=True)
class LargeCase:
    """A model, a batch and a cluster."""

    name: str
    make: Callable[[LargeCase], nn.Module]
    """Make the model of these sizes; it maps tokens to logits."""
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    devices: int
    cluster: str
    batch: int

    def smaller(self, layers: int, width: int, devices: int, batch: int) -> LargeCase:
        """Return the same kind of model and cluster at a smaller size, with heads of the same width."""
        heads = width * self.heads // self.width
        return replace(self, layers=layers, width=width, heads=heads, devices=devices, batch=batch)


def _gpt(case: LargeCase) -> nn.Module:
    from recipes.gpt import GPT

    return GPT(case.vocabulary, case.context, case.width, case.layers, case.heads)


def _llama(case: LargeCase) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocabulary,
            max_position_embeddings=case.context,
            hidden_size=case.width,
            intermediate_size=case.width * 13 // 4,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=8,
            use_cache=False,
        )
    )


CASES = (
    LargeCase("GPT-3 175B", _gpt, 96, 12288, 96, 50304, 2048, 1024, "a100_80", 1536),
    LargeCase("Llama 3.1 405B", _llama, 126, 16384, 128, 128256, 8192, 512, "h100", 2048),
)


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.model(x)
        logits = found if isinstance(found, torch.Tensor) else found.logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def plan_case(case: LargeCase) -> tuple[Plan, nn.Module, float]:
    """Return the plan, the model, and the seconds of capture and planning."""
    started = time.perf_counter()
    with torch.device("meta"):
        module = _Loss(case.make(case))
        example = tuple(torch.zeros(2, case.context, dtype=torch.long) for _ in range(2))
    found = plan(module, example, cluster=case.cluster, devices=case.devices, batch_size=case.batch, dtype="bfloat16")
    return found, module, time.perf_counter() - started


def thousand() -> str:
    """The plan of each case as a table, and the seconds that it took with the capture."""
    lines: list[str] = []
    for case in CASES:
        found, module, seconds = plan_case(case)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        lines += [
            line
            for line in found.describe().splitlines()
            if line.split(" ")[0] in ("mesh", "schedule", "predicted", "bound", "split", "memory")
        ]
        lines += [
            f"{case.name}, {parameters / 1e9:.0f} billion parameters, {case.devices} devices: capture and plan {seconds:.1f} s",
            "",
        ]
    return "\n".join(lines[:-1])
