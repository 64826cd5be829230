"""Pipelines whose heads run in slices equal one process on the whole batch, with transformers and with a model of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import GPT
from support.ranks import run_ranks
from support.reference import assert_close
from torch import nn

SAMPLES, LENGTH, VOCABULARY = 7, 12, 32


class WithLoss(nn.Module):
    """The loss of a model of transformers: its own, which is in float32, or the same one in float64."""

    def __init__(self, model: Any, own: bool) -> None:
        super().__init__()
        self.model, self.own = model, own

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.own:
            loss: torch.Tensor = self.model(input_ids=x, labels=y).loss
            return loss
        scores = self.model(input_ids=x).logits[..., :-1, :].contiguous()
        return F.cross_entropy(scores.view(-1, scores.size(-1)), y[..., 1:].contiguous().view(-1))


def build(name: str) -> nn.Module:
    torch.manual_seed(2)
    if name == "gpt":
        model: nn.Module = GPT()
    else:
        transformers = pytest.importorskip("transformers")
        tied, own = "tied" in name, "own loss" in name
        sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied}
        if name.startswith("gpt2"):
            off = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
            config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **sizes, **off)
            model = WithLoss(transformers.GPT2LMHeadModel(config), own)
        else:
            width = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
            config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **width, **sizes)
            model = WithLoss(transformers.LlamaForCausalLM(config), own)
    return model.double()


CUTS = {"gpt": "blocks.1", "gpt2": "model.transformer.h.1", "llama": "model.model.layers.1"}


def samples(size: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples with very different numbers of targets."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, 3, 1, 7, 2, 2, 2])[-size:]
    return x, x.masked_fill(torch.arange(LENGTH)[None] >= lengths[:, None], -100)


def _run(name: str, options: dict[str, Any]) -> Any:
    from pipepart import Pipeline

    fixed: dict[str, Any] = {"stages": 2, "microbatches": 3, "split_at": [CUTS[name.partition(",")[0]]]}
    pipe = Pipeline(build(name), samples(), **fixed, **options)
    evaluated = pipe.evaluate(*samples(5))
    results = [pipe.step(*samples()), pipe.step(*samples(5))]  # a smaller last batch
    calls = sum(
        "sliced_cross_entropy" in str(node.target)
        for program in pipe._runtime.steps.programs.values()
        for chunk in program._executor._stage.chunks.values()
        for node in chunk.module.graph.nodes
    )
    return results, evaluated, {key: p.grad for key, p in pipe.named_parameters()}, pipe.plan.head, calls


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "our gpt, tied": ("gpt", {"schedule": "1f1b"}),
    "each micro-batch alone": ("gpt", {"schedule": "zb_h1", "loss": "microbatch"}),
    "llama": ("llama", {"schedule": "zb_h1"}),
    "llama, tied, recomputing": ("llama, tied", {"schedule": "1f1b", "recompute": True}),
    "gpt2, tied, its own loss": ("gpt2, tied, own loss", {"schedule": "zb_h1"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process(case: str) -> None:
    name, options = CASES[case]
    answers = run_ranks(2, _run, name, {**options, "head": {"slice": 5}})
    model, exact = build(name), 1e-5 if "own loss" in name else 1e-9
    losses = []
    for batch in (samples(), samples(5)):
        if options.get("loss") == "microbatch":
            share = list(zip(*(tensor.tensor_split(3) for tensor in batch)))
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
            assert_close("loss", found, loss, exact)
        for key, gradient in gradients.items():
            if gradient is not None:
                seen.add(key)
                assert_close(key, gradient, expected[key], exact)
    assert seen == set(expected)
    assert answers[1][4] > 0, "the head of the last stage is not in slices"
