"""Tiny transformers models: language, speech and vision-language."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

__all__ = ["ARCHITECTURES"]

VOCABULARY = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}

Example = Callable[[int], tuple[torch.Tensor, ...]]
Builder = Callable[[], tuple[nn.Module, Example]]


class WithLoss(nn.Module):
    """A library model called by keyword, reduced to a scalar loss."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], extra: dict[str, Any] | None = None):
        super().__init__()
        self.model, self.names, self.extra = model, names, extra or {}

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        out = self.model(**dict(zip(self.names, values)), **self.extra)
        if getattr(out, "loss", None) is not None:
            return out.loss
        for name in ("logits", "last_hidden_state"):
            if hasattr(out, name):
                return getattr(out, name).float().pow(2).mean()
        first = out if isinstance(out, torch.Tensor) else out[0]
        return first.float().pow(2).mean()


def tokens(batch: int, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def text(batch: int) -> tuple[torch.Tensor, ...]:
    ids = tokens(batch)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return ids, mask, ids.clone()


def _text(config: str, model: str, drop: tuple[str, ...] = (), **options: Any) -> Builder:
    def build() -> tuple[nn.Module, Example]:
        import transformers

        settings = {key: value for key, value in {**COMMON, **options}.items() if key not in drop}
        settings = getattr(transformers, config)(**settings)
        settings.use_cache = False
        return WithLoss(getattr(transformers, model)(settings), ("input_ids", "attention_mask", "labels")), text

    return build


def _vision(config: str, model: str, size: int = 32, labels: bool = True, **options: Any) -> Builder:
    def build() -> tuple[nn.Module, Example]:
        import transformers

        settings = getattr(transformers, config)(**options)
        network = getattr(transformers, model)(settings)
        classes = getattr(settings, "num_labels", 2)

        def example(batch: int) -> tuple[torch.Tensor, ...]:
            image = torch.randn(batch, 3, size, size)
            return (image, torch.randint(0, classes, (batch,))) if labels else (image,)

        return WithLoss(network, ("pixel_values", "labels")[: 2 if labels else 1]), example

    return build


def _speech(config: str, model: str, **options: Any) -> Builder:
    def build() -> tuple[nn.Module, Example]:
        import transformers

        settings = getattr(transformers, config)(
            vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2,
            num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_length=2, ctc_zero_infinity=True,
            **options,
        )  # fmt: skip
        network = getattr(transformers, model)(settings)
        return WithLoss(network, ("input_values", "labels")), lambda batch: (
            torch.randn(batch, 1480),
            torch.randint(1, 32, (batch, 5)),
        )

    return build


def _clip(config: str, model: str, **options: Any) -> Builder:
    def build() -> tuple[nn.Module, Example]:
        import transformers

        settings = getattr(transformers, config)(text_config=dict(COMMON), vision_config=VISION, **options)
        network = WithLoss(
            getattr(transformers, model)(settings),
            ("input_ids", "attention_mask", "pixel_values"),
            {"return_loss": True},
        )
        return network, lambda batch: (*text(batch)[:2], torch.randn(batch, 3, 32, 32))

    return build


def _whisper() -> tuple[nn.Module, Example]:
    import transformers

    settings = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20,
        max_target_positions=64, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    network = WithLoss(transformers.WhisperForConditionalGeneration(settings), ("input_features", "labels"))
    return network, lambda batch: (torch.randn(batch, 8, 40), tokens(batch))


GROUPED = {"num_key_value_heads": 2}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
}  # fmt: skip

ARCHITECTURES: dict[str, Builder] = {
    "gpt2": _text("GPT2Config", "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neo": _text("GPTNeoConfig", "GPTNeoForCausalLM", num_layers=2, num_heads=4,
                     attention_types=[[["global", "local"], 1]], window_size=8),
    "gptj": _text("GPTJConfig", "GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "gpt_neox": _text("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "gpt_bigcode": _text("GPTBigCodeConfig", "GPTBigCodeForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "codegen": _text("CodeGenConfig", "CodeGenForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=64,
                     rotary_dim=4),
    "llama": _text("LlamaConfig", "LlamaForCausalLM", **GROUPED),
    "mistral": _text("MistralConfig", "MistralForCausalLM", **GROUPED),
    "qwen2": _text("Qwen2Config", "Qwen2ForCausalLM", **GROUPED),
    "qwen3": _text("Qwen3Config", "Qwen3ForCausalLM", head_dim=8, **GROUPED),
    "mixtral": _text("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, **GROUPED),
    "qwen3_moe": _text("Qwen3MoeConfig", "Qwen3MoeForCausalLM", head_dim=8, num_experts=4, num_experts_per_tok=2,
                       moe_intermediate_size=16, **GROUPED),
    "gemma": _text("GemmaConfig", "GemmaForCausalLM", head_dim=8, **GROUPED),
    "gemma2": _text("Gemma2Config", "Gemma2ForCausalLM", head_dim=8, **GROUPED),
    "phi": _text("PhiConfig", "PhiForCausalLM"),
    "phi3": _text("Phi3Config", "Phi3ForCausalLM", **GROUPED),
    "opt": _text("OPTConfig", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    "bloom": _text("BloomConfig", "BloomForCausalLM", n_layer=2, n_head=4),
    "falcon": _text("FalconConfig", "FalconForCausalLM"),
    "mamba": _text("MambaConfig", "MambaForCausalLM", state_size=4),
    "stablelm": _text("StableLmConfig", "StableLmForCausalLM", num_key_value_heads=4),
    "olmo": _text("OlmoConfig", "OlmoForCausalLM"),
    "olmo2": _text("Olmo2Config", "Olmo2ForCausalLM"),
    "starcoder2": _text("Starcoder2Config", "Starcoder2ForCausalLM", **GROUPED),
    "cohere": _text("CohereConfig", "CohereForCausalLM", **GROUPED),
    "granite": _text("GraniteConfig", "GraniteForCausalLM", **GROUPED),
    "xglm": _text("XGLMConfig", "XGLMForCausalLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=64),
    "bert": _text("BertConfig", "BertForMaskedLM"),
    "roberta": _text("RobertaConfig", "RobertaForMaskedLM", max_position_embeddings=80),
    "distilbert": _text("DistilBertConfig", "DistilBertForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "deberta": _text("DebertaConfig", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta_v2": _text("DebertaV2Config", "DebertaV2ForMaskedLM", relative_attention=True,
                        pos_att_type=["c2p", "p2c"], position_buckets=8),
    "albert": _text("AlbertConfig", "AlbertForMaskedLM", embedding_size=16),
    "electra": _text("ElectraConfig", "ElectraForMaskedLM", embedding_size=16),
    "mpnet": _text("MPNetConfig", "MPNetForMaskedLM"),
    "modernbert": _text("ModernBertConfig", "ModernBertForMaskedLM"),
    "mobilebert": _text("MobileBertConfig", "MobileBertForMaskedLM", embedding_size=32, intra_bottleneck_size=32,
                        true_hidden_size=32),
    "squeezebert": _text("SqueezeBertConfig", "SqueezeBertForMaskedLM", embedding_size=32),
    "camembert": _text("CamembertConfig", "CamembertForMaskedLM", max_position_embeddings=80),
    "xlnet": _text("XLNetConfig", "XLNetLMHeadModel", ("max_position_embeddings",), d_model=32, n_layer=2, n_head=4,
                   d_inner=64),
    "longformer": _text("LongformerConfig", "LongformerForMaskedLM", attention_window=8),
    "t5": _text("T5Config", "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                decoder_start_token_id=0),
    "bart": _text("BartConfig", "BartForConditionalGeneration", **SEQ2SEQ),
    "mbart": _text("MBartConfig", "MBartForConditionalGeneration", **SEQ2SEQ),
    "pegasus": _text("PegasusConfig", "PegasusForConditionalGeneration", **SEQ2SEQ),
    "vit": _vision("ViTConfig", "ViTForImageClassification", **VISION),
    "deit": _vision("DeiTConfig", "DeiTForImageClassification", **VISION),
    "beit": _vision("BeitConfig", "BeitForImageClassification", **VISION),
    "dinov2": _vision("Dinov2Config", "Dinov2ForImageClassification", **VISION),
    "swin": _vision("SwinConfig", "SwinForImageClassification", image_size=32, patch_size=4, embed_dim=16,
                    depths=[1, 2], num_heads=[2, 4], window_size=4),
    "convnext": _vision("ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[8, 16, 24, 32],
                        depths=[1, 1, 2, 1]),
    "segformer": _vision("SegformerConfig", "SegformerForImageClassification", 64, hidden_sizes=[8, 16, 24, 32],
                         depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4]),
    "hf_resnet": _vision("ResNetConfig", "ResNetForImageClassification", embedding_size=8,
                         hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], layer_type="basic"),
    "clip": _clip("CLIPConfig", "CLIPModel", projection_dim=16),
    "siglip": _clip("SiglipConfig", "SiglipModel"),
    "whisper": _whisper,
    "wav2vec2_ctc": _speech("Wav2Vec2Config", "Wav2Vec2ForCTC"),
    "hubert_ctc": _speech("HubertConfig", "HubertForCTC"),
    "wav2vec2_all_layers": _speech("Wav2Vec2Config", "Wav2Vec2ForCTC", layerdrop=0.0),
    "hubert_all_layers": _speech("HubertConfig", "HubertForCTC", layerdrop=0.0),
}  # fmt: skip
