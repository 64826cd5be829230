"""Pipelines whose heads run in slices equal one process on the whole batch, with transformers and with a model of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import GPT
from support.ranks import run_ranks
from support.reference import assert_close
from torch import nn

SAMPLES, LENGTH, VOCABULARY = 7, 12, 32


class WithLoss(nn.Module):
    """Returns the loss of a model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=x, labels=y).loss
        return loss


def build(name: str, frozen: bool = False) -> nn.Module:
    torch.manual_seed(2)
    if name == "gpt":
        model: nn.Module = GPT()
    else:
        transformers = pytest.importorskip("transformers")
        tied = name.endswith("tied")
        sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied}
        if name.startswith("gpt2"):
            off = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
            config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **sizes, **off)
            model = WithLoss(transformers.GPT2LMHeadModel(config))
        else:
            width = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
            config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **width, **sizes)
            model = WithLoss(transformers.LlamaForCausalLM(config))
    if frozen:
        next(p for n, p in model.named_parameters() if "head" in n).requires_grad_(False)
    return model.double()


CUTS = {"gpt": "blocks.1", "gpt2": "model.transformer.h.1", "llama": "model.model.layers.1"}


def samples(size: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples with very different numbers of targets; the last one has none."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, 3, 1, 7, 2, 2, 0])[-size:]
    return x, x.masked_fill(torch.arange(LENGTH)[None] >= lengths[:, None], -100)


def _run(name: str, options: dict[str, Any], frozen: bool) -> Any:
    from pipepart import Pipeline

    model = build(name, frozen)
    cut = CUTS[name.partition(",")[0]]
    pipe = Pipeline(
        model, samples(), stages=2, microbatches=3, split_at=[cut], recompute=options.pop("recompute", False), **options
    )
    evaluated = pipe.evaluate(*samples(5))
    results = [pipe.step(*samples()), pipe.step(*samples(5))]  # a smaller last batch
    calls = sum(
        "sliced_cross_entropy" in str(node.target)
        for program in pipe._runtime.steps.programs.values()
        for chunk in program.step.chunks
        for node in getattr(chunk.module, "graph").nodes
    )
    return results, evaluated, {key: p.grad for key, p in pipe.named_parameters()}, pipe.plan.head, calls


CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "our gpt, tied": ("gpt", {"schedule": "1f1b"}, False),
    "our gpt in two halves": ("gpt", {"schedule": "zb_h1"}, False),
    "llama": ("llama", {"schedule": "zb_h1"}, False),
    "llama with a frozen head": ("llama", {"schedule": "zb_h1"}, True),
    "llama, tied, recomputing": ("llama, tied", {"schedule": "1f1b", "recompute": True}, False),
    "gpt2, tied": ("gpt2, tied", {"schedule": "zb_h1"}, False),
    "gpt2, each micro-batch alone": ("gpt2", {"schedule": "1f1b", "loss": "microbatch"}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process(case: str) -> None:
    name, options, frozen = CASES[case]
    answers = run_ranks(2, _run, name, {**options, "head": {"slice": 5}}, frozen)
    model = build(name, frozen)
    losses = []
    for batch in (samples(), samples(5)):
        if options.get("loss") == "microbatch":
            share = [part for part in zip(*(tensor.tensor_split(3) for tensor in batch))]
            loss = sum(model(*part) * len(part[0]) for part in share) / len(batch[0])  # type: ignore[misc]
        else:
            loss = model(*batch)
        loss.backward()
        losses.append(loss.detach())
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    seen = set()
    for results, evaluated, gradients, tokens, _ in answers:
        assert tokens == 5
        for found, loss in zip((*results, evaluated), (*losses, losses[1])):
            assert_close("loss", found, loss)
        for key, gradient in gradients.items():
            if gradient is not None:
                seen.add(key)
                assert_close(key, gradient, expected[key])
    assert seen == set(expected)
    assert answers[1][4] > 0, "the head of the last stage is not in slices"
