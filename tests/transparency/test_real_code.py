"""Code of libraries and their idioms in a pipeline of two stages: equal to one process on the whole batch."""

from __future__ import annotations

import functools

import pytest
import torch
from einops import rearrange, reduce
from einops.layers.torch import Rearrange
from support.ranks import run_ranks
from support.reference import assert_close
from torch import nn
from torch.func import functional_call, vmap


@functools.cache
def triangle(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(n, n, dtype=dtype).tril()


@torch.compile(backend="eager")
def squared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).pow(2).mean()


class Mixed(nn.Module):
    """einops, a cached mask, a table by size, ``torch.func``, rows that are sorted and put back, a compiled loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed, self.replaced, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.heads = Rearrange("b n (h d) -> b h n d", h=2)
        self.offsets: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        n = x.shape[1]
        if n not in self.offsets:
            self.offsets[n] = torch.arange(n, dtype=x.dtype).view(-1, 1) / n
        x = triangle(n, x.dtype) @ (x + self.offsets[n])
        x = x + rearrange(self.heads(x).softmax(-1), "b h n d -> b n (h d)")
        scale = reduce(x, "b n d -> b 1 d", "mean")
        x = vmap(lambda row, s: self.mixed(row).tanh() * s)(x, scale)
        rows = rearrange(x, "b n d -> (b n) d")
        order = rows[:, 0].argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        x = rearrange(self.replaced(rows[order])[back], "(b n) d -> b n d", n=n)
        x = x + functional_call(self.replaced, {"bias": self.replaced.bias * 2}, (x,))
        return squared(self.last(x), y)


def _steps(pipe, plain: nn.Module, batches: list[tuple], relative: float = 1e-8) -> None:
    for batch in batches:
        plain.zero_grad()
        for parameter in pipe.parameters():
            parameter.grad = None
        loss = pipe.step(*batch)
        expected = plain(*batch)
        expected.backward()
        assert_close("loss", loss, expected.detach(), relative)
        gradients = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert_close(name, parameter.grad, gradients[name].grad, relative)


def _mixed(schedule: str) -> None:
    from pipepart import Pipeline

    torch.manual_seed(0)
    model, plain = Mixed().double(), Mixed().double()
    plain.load_state_dict(model.state_dict())
    batches = [tuple(torch.randn(2, b, n, 8).double()) for b, n in ((8, 6), (8, 9), (4, 6))]
    pipe = Pipeline(model, batches[0], stages=2, microbatches=4, schedule=schedule)
    _steps(pipe, plain, batches)
    with torch.no_grad():
        assert_close("evaluation", pipe.evaluate(*batches[0]), plain.eval()(*batches[0]), 1e-9)


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "gpipe", "zb_h1")]
)
def test_idioms_of_libraries(schedule: str) -> None:
    run_ranks(2, _mixed, schedule)


class Experts(nn.Module):
    """A tiny DeepSeek-V3: experts are sorted together and back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
        layers = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "max_position_embeddings": 64}
        config = DeepseekV3Config(**sizes, **heads, **experts, **ranks, **layers, experts_implementation=how)
        self.model = DeepseekV3ForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _experts(how: str, dtype: torch.dtype, relative: float) -> None:
    from pipepart import Pipeline

    torch.manual_seed(0)
    model, plain = Experts(how).to(dtype), Experts(how).to(dtype)
    plain.load_state_dict(model.state_dict())
    batches = [(torch.randint(0, 64, (8, 10)),) for _ in range(2)]
    _steps(Pipeline(model, batches[0], stages=2, microbatches=4), plain, batches, relative)


@pytest.mark.slow
# `grouped_mm` has no kernel for float64, so it is compared in float32.
@pytest.mark.parametrize(("how", "dtype"), [("eager", torch.float64), ("grouped_mm", torch.float32)])
def test_experts_of_transformers(how: str, dtype: torch.dtype) -> None:
    run_ranks(2, _experts, how, dtype, 1e-6 if dtype is torch.float64 else 2e-4)
