"""``language_models``: small random models of many types of transformers, loaded and written by the recipe `finetune_hf`.

For each type: the difference of logits to `from_pretrained`, whether the written tensors are those of the files, and the
difference of a packed row to its conversations alone (types in `PACKED` must have none).
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipepart.lightning import materialise

__all__ = ["main"]

_SIZES = {
    "vocab_size": 280, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "pad_token_id": 0,
}  # fmt: skip
_HEAD = {**_SIZES, "head_dim": 8}
_WINDOW = {**_SIZES, "sliding_window": 8}
_GPT = {"vocab_size": 280, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160}
_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 4, "first_k_dense_replace": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TYPES: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 280, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "cohere": _SIZES, "cohere2": _WINDOW, "deepseek_v3": {**_SIZES, **_EXPERTS, **_LATENT}, "ernie4_5": _SIZES,
    "exaone4": _WINDOW,
    "falcon": {"vocab_size": 280, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gemma": _HEAD, "gemma2": {**_HEAD, **_WINDOW}, "gemma3_text": {**_HEAD, **_WINDOW}, "glm4": _HEAD, "gpt2": _GPT,
    "gpt_neo": {"vocab_size": 280, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 160},
    "gpt_neox": _SIZES, "gpt_oss": {**_HEAD, **_WINDOW, **_EXPERTS}, "gptj": {**_GPT, "rotary_dim": 4}, "granite": _SIZES,
    "granitemoe": {**_SIZES, **_EXPERTS}, "helium": _HEAD, "llama": _SIZES,
    "mamba": {"vocab_size": 280, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "mistral": _WINDOW,
    "mixtral": {**_SIZES, **_EXPERTS}, "mpt": {"vocab_size": 280, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "nemotron": _SIZES, "olmo": _SIZES, "olmo2": _SIZES, "olmo3": _WINDOW,
    "opt": {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}, "phi": _SIZES, "phi3": _SIZES,
    "qwen2": {**_SIZES, "tie_word_embeddings": True},
    "qwen2_moe": {**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 16}, "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, **_EXPERTS}, "smollm3": _SIZES, "stablelm": _SIZES, "starcoder2": _SIZES,
}  # fmt: skip


def _measured(kind: str, folder: Path) -> tuple[float, bool, str]:
    """The difference of logits, whether it is written as it was, and the difference of packed conversations."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.finetune_hf import FineTune
    from recipes.tiny_hf import make_folder

    make_folder(folder, AutoConfig.for_model(kind, **TYPES[kind]), shard="20KB")
    module = FineTune(partial(torch.optim.AdamW), pretrained=str(folder), length=20)
    module.configure_model()
    materialise(module)
    module.eval()
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, files = torch.arange(24).view(2, 12), module.weights.files
    with torch.no_grad():
        error = float((module.model(tokens).logits - plain(tokens).logits).abs().max())
        written = module.weights.written(module.state_dict())
        same = set(written) == set(files) and all(torch.equal(value, files[key]) for key, value in written.items())
        positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
        try:
            row = plain(tokens, position_ids=positions, use_cache=False).logits
            alone = [plain(part, use_cache=False).logits for part in (tokens[:, :5], tokens[:, 5:])]
            packed = f"{float((row - torch.cat(alone, 1)).abs().max()):.1e}"
        except (TypeError, RuntimeError, ValueError) as failure:
            packed = type(failure).__name__
    return error, same, packed


def main(arguments: list[str]) -> int:
    """Measure the types of the command line, or all; 1 if one is not loaded or written exactly, or wrongly packed."""
    from recipes.finetune_hf import PACKED

    parser = argparse.ArgumentParser(prog="python -m tools.bench.lightning language_models", description=__doc__)
    parser.add_argument("types", nargs="*", help="of " + ", ".join(TYPES))
    wrong = []
    print(f"{'type':14}{'logits':>9}  {'written':8}{'packed row':>11}  may be packed")
    for kind in parser.parse_args(arguments).types or TYPES:
        with tempfile.TemporaryDirectory() as folder:
            error, same, packed = _measured(kind, Path(folder))
        print(
            f"{kind:14}{error:9.1e}  {'equal' if same else 'DIFFERS':8}{packed:>11}  {'yes' if kind in PACKED else 'no'}",
            flush=True,
        )
        if error > 0 or not same or (kind in PACKED and not float(packed) < 1e-5):
            wrong.append(kind)
    print(f"wrong: {', '.join(wrong)}" if wrong else "all are loaded and written exactly")
    return int(bool(wrong))
