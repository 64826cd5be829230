"""Models of libraries that take more than one line to build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from tools.bench.zoo.library_parts import Built, Squares, floats, ids, of

__all__ = [
    "DECODERS",
    "adapted",
    "autoencoder",
    "conditioned_unet",
    "decoder",
    "dit",
    "litgpt",
    "llama",
    "mixer",
    "sentences",
    "tabular",
    "unet",
    "unet1d",
    "vq_autoencoder",
]

# ---- x-transformers


def decoder(**options: Any) -> nn.Module:
    layers = of("x_transformers.Decoder", dim=32, depth=3, heads=4, attn_dim_head=8, **options)
    return of("x_transformers.TransformerWrapper", num_tokens=64, max_seq_len=32, attn_layers=layers)


DECODERS: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "relative": {"rel_pos_bias": True}, "glu": {"ff_glu": True, "ff_swish": True}, "rms": {"use_rmsnorm": True},
    "one_kv": {"attn_one_kv_head": True}, "qk_norm": {"attn_qk_norm": True}, "sandwich": {"sandwich_norm": True},
    "talking": {"attn_pre_talking_heads": True},
}  # fmt: skip

# ---- diffusers


def unet() -> Built:
    model = of(
        "diffusers.UNet2DModel", sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8, attention_head_dim=8,
    )  # fmt: skip
    return Squares(model), lambda n: (torch.randn(n, 3, 16, 16), torch.randint(0, 100, (n,)))


def conditioned_unet() -> Built:
    model = of(
        "diffusers.UNet2DConditionModel", sample_size=16, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), norm_num_groups=8, cross_attention_dim=24,
        attention_head_dim=4,
    )  # fmt: skip
    return Squares(model), lambda n: (torch.randn(n, 4, 16, 16), torch.randint(0, 100, (n,)), torch.randn(n, 5, 24))


def autoencoder() -> Built:
    model = of(
        "diffusers.AutoencoderKL", block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8, layers_per_block=1,
    )  # fmt: skip
    return Squares(model), floats((3, 16, 16))


def vq_autoencoder() -> Built:
    model = of(
        "diffusers.models.autoencoders.vq_model.VQModel", block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=16,
    )  # fmt: skip
    return Squares(model), floats((3, 16, 16))


def dit() -> Built:
    model = of(
        "diffusers.DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.model(x, timestep=t, class_labels=y).sample.pow(2).mean()

    return Called(), lambda n: (torch.randn(n, 4, 8, 8), torch.randint(0, 100, (n,)), torch.randint(0, 10, (n,)))


def unet1d() -> Built:
    model = of(
        "diffusers.UNet1DModel", sample_size=32, in_channels=2, out_channels=2, block_out_channels=(32, 32, 64),
        norm_num_groups=8, layers_per_block=1, extra_in_channels=64,
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )  # fmt: skip
    return Squares(model), lambda n: (torch.randn(n, 2, 32), torch.randint(0, 100, (n,)))


# ---- peft


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))


def adapted(config: str, make: Callable[[], nn.Module] = gpt2, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        base = make()
        model = of("peft.get_peft_model", base, of(f"peft.{config}", task_type="CAUSAL_LM", **options))

        class Called(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.model(input_ids=ids, labels=ids, use_cache=False).loss

        return Called(), ids()

    return build


# ---- litgpt


def litgpt(**options: Any) -> nn.Module:
    base = {"block_size": 32, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return of("litgpt.GPT", of("litgpt.Config", **{**base, **options}))


def tabular() -> Built:
    model = of(
        "rtdl_revisiting_models.FTTransformer", n_cont_features=6, cat_cardinalities=[3, 4], d_out=2,
        **{**_default_ft(), "n_blocks": 2},
    )  # fmt: skip
    return Squares(model), lambda n: (
        torch.randn(n, 6),
        torch.stack([torch.randint(0, 3, (n,)), torch.randint(0, 4, (n,))], 1),
    )


def _default_ft() -> dict[str, Any]:
    from rtdl_revisiting_models import FTTransformer

    options = FTTransformer.get_default_kwargs(1)
    options.pop("_is_default", None)
    return {**options, "d_block": 32, "attention_n_heads": 4}


# ---- einops, transformers, timm: also in the main environment


def mixer() -> Built:
    from einops import rearrange, reduce
    from einops.layers.torch import Rearrange

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), nn.Linear(48, 32))
            self.tokens, self.channels, self.head = nn.Linear(16, 16), nn.Linear(32, 32), nn.Linear(32, 5)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            x = self.patches(image)
            x = x + rearrange(self.tokens(rearrange(x, "b n d -> b d n")).relu(), "b d n -> b n d")
            x = x + self.channels(x).relu()
            return self.head(reduce(x, "b n d -> b d", "mean")).pow(2).mean()

    return Mixer(), floats((3, 16, 16))


def sentences(similarity: str) -> Callable[[], Built]:
    def build() -> Built:
        from sentence_transformers.sentence_transformer.modules import Pooling
        from transformers import BertConfig, BertModel

        class Pairs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
                self.body = BertModel(BertConfig(**size, intermediate_size=48, max_position_embeddings=32))
                self.pooling = Pooling(32, pooling_mode=similarity)

            def embed(self, ids: torch.Tensor) -> torch.Tensor:
                mask = torch.ones_like(ids)
                words = self.body(input_ids=ids, attention_mask=mask).last_hidden_state
                pooled = self.pooling({"token_embeddings": words, "attention_mask": mask})
                return pooled["sentence_embedding"]

            def forward(self, left: torch.Tensor, right: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
                return F.mse_loss(torch.cosine_similarity(self.embed(left), self.embed(right)), score)

        return Pairs(), lambda n: (*ids()(n), *ids()(n), torch.rand(n))

    return build
