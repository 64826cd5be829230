"""Fine-tuning of models of transformers: filled from safetensors stage by stage, equal to one process, saved for others."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks

from pipepart import PipelineStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft")

SMALL: dict[str, Any] = {"vocab_size": 280, "initializer_range": 0.2}
LAYERED: dict[str, Any] = {
    **SMALL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160,
}  # fmt: skip
RATE = {"lr": 0.01, "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"stages": 2, "model": {"gradient_checkpointing": True}, "data": {}},
    "qwen3": {"stages": 2, "model": {"lora_rank": 4}, "data": {"packing": True}},
    "gpt2": {"stages": 3, "model": {}, "data": {"packing": True}},
    "gpt2 with adapters": {"stages": 2, "model": {"lora_rank": 3}, "data": {}},
}
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    "logger": False, "use_distributed_sampler": False,
}  # fmt: skip


def _config(name: str) -> Any:
    from transformers import GPT2Config, LlamaConfig, Qwen3Config

    if name == "llama":
        return LlamaConfig(**LAYERED)
    if name == "qwen3":
        return Qwen3Config(**LAYERED, head_dim=8, tie_word_embeddings=True)
    return GPT2Config(
        **SMALL, n_embd=32, n_layer=3, n_head=4, n_positions=160, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )


def _folder(name: str, folder: Path) -> Path:
    from recipes.tiny_hf import make_folder

    make_folder(folder, _config(name.split()[0]), shard="20KB", seed=3)
    return folder


def _parts(folder: str, case: dict[str, Any], out: str | None = None) -> tuple[Any, Any]:
    from recipes.chat import ChatData
    from recipes.finetune_hf import FineTune

    torch.manual_seed(5)
    data = ChatData(folder, length=120, batch_size=6, **case["data"])
    shared = {"packing": data.packing, "length": data.length, "folder": out, "dtype": "float64"}
    module = FineTune(partial(torch.optim.AdamW, **RATE), pretrained=folder, **{**shared, **case["model"]})
    return module, data


def _in_order(data: Any) -> Any:
    """The loader of the data, without shuffling."""
    data.setup("fit")
    return data._loader(data.train[:60], shuffle=False)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, *args) -> None:
        self.found.append(float(outputs["loss"]))


def _train(folder: str, case: dict[str, Any], out: str, stages: int) -> dict[str, Any]:
    module, data = _parts(folder, case, out)
    module.configure_model()
    adapters = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
    losses = Losses()
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=stages, microbatches=3, schedule="1f1b"), devices=stages, max_steps=3,
        callbacks=[losses], **QUIET,
    )  # fmt: skip
    trainer.fit(module, _in_order(data))
    own = [name for name, p in module.named_parameters() if not p.is_meta and name in module.base_names]
    numbers = {name: p.numel() for name, p in module.named_parameters() if name in module.base_names}
    return {
        "losses": losses.found,
        "adapters": adapters,
        "read": module.weights.files.bytes_read,
        "own": sum(4 * numbers[name] for name in own),
        "whole": sum(4 * number for number in numbers.values()),
    }


def _reference(folder: str, case: dict[str, Any], adapters: dict[str, torch.Tensor]) -> tuple[list[float], Any]:
    """A plain loop of transformers, peft and AdamW in one process."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if adapters:
        rank = case["model"]["lora_rank"]
        model = get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        values = {name.removeprefix("model."): value for name, value in adapters.items()}
        assert not model.load_state_dict(values, strict=False).unexpected_keys
        assert {n for n, p in model.named_parameters() if p.requires_grad} == set(values)
    model.train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]},
            {"params": [p for p in model.parameters() if p.requires_grad and p.dim() < 2], "weight_decay": 0.0},
        ],
        **RATE,
    )
    losses = []
    for batch, _ in zip(_in_order(_parts(folder, case)[1]), range(3)):
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, model.eval()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_a_plain_loop_and_saved_for_others(name: str, tmp_path: Path) -> None:
    """Losses, the folder and the adapter, and the bytes that each rank has read."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    case, folder, out = CASES[name], str(_folder(name, tmp_path / "base")), tmp_path / "out"
    assert len(list(Path(folder).glob("*.safetensors"))) > 3
    answers = run_ranks(case["stages"], _train, folder, case, str(out), case["stages"])
    losses, model = _reference(folder, case, answers[0]["adapters"])
    for rank, answer in enumerate(answers):
        assert answer["losses"] == pytest.approx(losses, rel=1e-9), rank
        assert answer["read"] == answer["own"] < 0.85 * answer["whole"], rank
    assert sum(answer["own"] for answer in answers) >= answers[0]["whole"]
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = model(tokens).logits
        saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
        torch.testing.assert_close(saved.eval()(tokens).logits, expected, rtol=0, atol=1e-9)
        if answers[0]["adapters"]:
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            again = PeftModel.from_pretrained(base, f"{out}-adapter")
            torch.testing.assert_close(again.eval()(tokens).logits, expected, rtol=0, atol=1e-9)
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(folder).chat_template
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
