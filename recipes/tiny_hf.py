"""A small model folder as the transformers library writes it, with random weights, so that the recipe needs no download."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

from pipepart.machine.host import cache_folder

__all__ = ["make_folder", "small_tokenizer", "start_folder"]

_WORDS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The tokens inside of `generation` are those that an assistant has written."""


def start_folder() -> Path:
    """The folder of a small Llama with random weights, which is made at the first call and kept in the cache folder."""
    text = json.dumps([_WORDS, TEMPLATE, _config().to_dict()], sort_keys=True, default=str)
    folder = cache_folder() / "models" / f"small-llama-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
        make_folder(made, _config())
        try:
            os.rename(made, folder)
        except OSError:  # another rank was first
            shutil.rmtree(made)
    return folder


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


def make_folder(folder: Path, config: PreTrainedConfig, shard: str = "200KB", seed: int = 0) -> None:
    """Write a model with random weights and the small tokenizer, in safetensors files of at most `shard`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.should_save_on_this_rank = lambda *_: True  # otherwise ranks but the first write no more than the tokenizer
    model.save_pretrained(folder, max_shard_size=shard)
    small_tokenizer(folder)


def small_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes with the marks of a chat."""
    bytes_as_letters = [chr(code) for code in range(256) if chr(code).isprintable() and code not in (32, 173)]
    bytes_as_letters += [chr(256 + number) for number in range(256 - len(bytes_as_letters))]
    vocabulary = {word: number for number, word in enumerate([*_WORDS, *bytes_as_letters])}
    marks = [
        {"id": number, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for number, word in enumerate(_WORDS)
    ]  # fmt: skip
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": marks, "normalizer": None,
        "pre_tokenizer": split, "post_processor": None, "decoder": split,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), pad_token="<|pad|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
