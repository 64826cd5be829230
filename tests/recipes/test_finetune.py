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

from pipepart import PipelineStrategy, consolidate

pytest.importorskip("transformers")
pytest.importorskip("peft")

SMALL: dict[str, Any] = {"vocab_size": 280, "initializer_range": 0.2}
LAYERED: dict[str, Any] = {
    **SMALL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160,
}  # fmt: skip
RATE = {"lr": 0.01, "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"stages": 2, "model": {"gradient_checkpointing": True}, "data": {}},
    "qwen3": {"stages": 2, "model": {"lora_rank": 4}, "data": {"packing": True}},
    "gpt2": {"stages": 2, "model": {}, "data": {"packing": True}},
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
        **SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=160, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
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


def _in_order(data: Any, samples: int = 60) -> Any:
    """The loader of the data, without shuffling."""
    data.setup("fit")
    return data._loader(data.train[:samples], shuffle=False)


def _strategy(module: Any, stages: int) -> PipelineStrategy:
    """With a given cut, before the second layer: a measured one may put nearly everything on one stage."""
    module.configure_model()
    second = [path for path, _ in module.named_modules() if path.endswith(("layers.1", "h.1"))]
    return PipelineStrategy(stages=stages, microbatches=2, schedule="1f1b", split_at=second if stages > 1 else None)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, *args) -> None:
        self.found.append(float(outputs["loss"]))


def _train(folder: str, case: dict[str, Any], out: str, stages: int) -> dict[str, Any]:
    module, data = _parts(folder, case, out)
    strategy = _strategy(module, stages)
    adapters = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
    losses = Losses()
    trainer = L.Trainer(strategy=strategy, devices=stages, max_steps=3, callbacks=[losses], **QUIET)
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


# ---- checkpoints


def _adapters(folder: str, stages: int, runs: list[dict[str, Any]]) -> list[tuple[list[float], list[str]]]:
    found = []
    for run in runs:
        module, data = _parts(folder, {"data": {}, "model": {"lora_rank": 3}})
        strategy, losses = _strategy(module, stages), Losses()
        trainer = L.Trainer(strategy=strategy, devices=stages, max_steps=run["steps"], callbacks=[losses], **QUIET)
        trainer.fit(module, _in_order(data, samples=6), ckpt_path=run.get("resume"))  # one batch in each epoch
        for path in run.get("save", ()):
            strategy.sharded = "shards" in path
            trainer.save_checkpoint(path)
        found.append((losses.found, [name for name, p in module.named_parameters() if p.requires_grad]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints_hold_adapters_only_and_resume(tmp_path: Path) -> None:
    """Two steps on 2 stages and one more on 1 are three steps; the base weights come from their folder each time."""
    folder, plain, shards = (
        str(_folder("gpt2", tmp_path / "base")),
        str(tmp_path / "one.ckpt"),
        str(tmp_path / "shards.ckpt"),
    )
    runs = [{"steps": 3}, {"steps": 2, "save": [plain, shards]}]
    ((through, adapters), (begun, _)), _ = run_ranks(2, _adapters, folder, 2, runs)
    for resumed, _ in _adapters(folder, 1, [{"steps": 3, "resume": path} for path in (plain, shards)]):
        assert begun + resumed == pytest.approx(through, rel=1e-9)
    consolidate(shards, tmp_path / "consolidated.ckpt")
    for path in (plain, tmp_path / "consolidated.ckpt"):
        saved = torch.load(path, weights_only=True)
        assert sorted(saved["state_dict"]) == sorted(adapters)
        assert len(saved["optimizer_states"][0]["state"]) == len(adapters)
    assert all("lora_" in name for name in adapters)


# ---- conversations

WITHOUT_MARKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FORGETFUL = WITHOUT_MARKS.replace("m['content']", "(m['content'] if loop.last or m['role'] == 'user' else '...')")
TALK = [
    {"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "Drei."},
    {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Four!"},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    from recipes.tiny_hf import small_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def _learned(tokenizer: Any, talk: Any) -> str:
    return tokenizer.decode([label for label in talk.labels if label != -100])


def test_only_answers_are_learned(tokenizer: Any) -> None:
    from recipes.chat import encode

    marked = encode(tokenizer, TALK)
    assert _learned(tokenizer, marked) == "Drei.<|im_end|>Four!<|im_end|>"
    assert all(label in (token, -100) for token, label in zip(marked.tokens, marked.labels))
    own = tokenizer.chat_template
    try:
        tokenizer.chat_template = WITHOUT_MARKS
        found = encode(tokenizer, TALK)
        assert found.tokens == marked.tokens
        assert _learned(tokenizer, found) == "Drei.<|im_end|>\nFour!<|im_end|>\n"
        tokenizer.chat_template = FORGETFUL
        with pytest.raises(ValueError, match="writes message 1 in another way when messages follow it"):
            encode(tokenizer, TALK)
        assert _learned(tokenizer, encode(tokenizer, TALK[:2])) == "Drei.<|im_end|>\n"
    finally:
        tokenizer.chat_template = own


def test_rows_of_packed_and_padded_conversations(tokenizer: Any) -> None:
    from recipes.chat import Conversation, pack, packed, padded

    talks = [Conversation([n] * size, [n] * size) for n, size in [(5, 4), (6, 5), (7, 3), (8, 8)]]
    rows = pack(talks, 8)
    assert [[len(one.tokens) for one in row] for row in rows] == [[4, 3], [5], [8]]
    batch = packed(rows, 0, 8)
    assert batch["input_ids"][0].tolist() == [5, 5, 5, 5, 7, 7, 7, 0]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch["labels"][0].tolist() == [-100, 5, 5, 5, -100, 7, 7, -100]
    batch = padded(talks[:2], 0, multiple=4)
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [4, 5]
    assert batch["labels"][0].tolist() == [5, 5, 5, 5, -100, -100, -100, -100]


def test_faults_of_a_file_are_named_with_their_line(tmp_path: Path) -> None:
    from recipes.chat import ChatData
    from recipes.tiny_hf import small_tokenizer

    small_tokenizer(tmp_path)
    file = tmp_path / "chats.jsonl"
    for line, text in [
        ("{", "line 2: Expecting"),
        ('{"text": "no messages"}', 'line 2: expected {"messages"'),
        ('{"messages": [{"role": "user", "content": "alone"}]}', "line 2: there is no message with the role assistant"),
    ]:
        file.write_text(json.dumps({"messages": TALK}) + "\n" + line + "\n")
        with pytest.raises(ValueError, match=text):
            ChatData(str(tmp_path), path=str(file)).setup("fit")
    file.write_text((json.dumps({"messages": TALK}) + "\n") * 20)
    data = ChatData(str(tmp_path), path=str(file), length=40)
    data.setup("fit")
    assert (len(data.train), len(data.val)) == (18, 2)
    assert all(len(one.tokens) == 40 for one in data.train)


def _tiny(kind: str) -> Any:
    from transformers import AutoConfig

    more = {name: 8 for name in ("head_dim", "sliding_window") if kind not in ("olmo", "olmo2", "phi", "stablelm")}
    if kind in ("gpt2", "gptj"):
        return AutoConfig.for_model(kind, vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)
    if "moe" in kind or kind == "mixtral":
        more |= {
            "num_experts": 8,
            "num_local_experts": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
    sizes = {**LAYERED, **more, "vocab_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    return AutoConfig.for_model(kind, **sizes)


@pytest.mark.slow
def test_conversations_of_one_row_do_not_see_each_other() -> None:
    """Of each type that may be packed: a packed row against the two conversations alone."""
    from transformers import AutoModelForCausalLM

    from recipes.finetune_hf import PACKED

    tokens = torch.arange(24).view(2, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    for kind in sorted(PACKED):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_tiny(kind)).eval()
        with torch.no_grad():
            row = model(tokens, position_ids=positions, use_cache=False).logits
            alone = [model(part, use_cache=False).logits for part in (tokens[:, :5], tokens[:, 5:])]
        torch.testing.assert_close(row, torch.cat(alone, 1), rtol=0, atol=1e-5, msg=kind)


def test_a_name_on_the_hub_is_its_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library of the hub keeps it; nothing is downloaded while ranks build the model."""
    from huggingface_hub import constants

    from recipes.hf_weights import local_folder

    place = tmp_path / "models--me--small"
    copy = place / "snapshots" / ("0" * 40)
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("{}")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert local_folder("me/small") == copy
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError):
        local_folder("me/other")


@pytest.mark.parametrize(("kind", "options", "text"), [
    ("opt", {"packing": True}, "packing=true cannot be used with OPTForCausalLM.*the type opt is not among"),
    ("llama", {"length": 500}, "data.length=500, but the model has 160 positions"),
    ("llama", {"dtype": "int8"}, "model.dtype='int8': expected"),
])  # fmt: skip
def test_refused_by_name(kind: str, options: dict[str, Any], text: str, tmp_path: Path) -> None:
    from transformers import OPTConfig

    from recipes.finetune_hf import FineTune
    from recipes.tiny_hf import make_folder

    make_folder(tmp_path, OPTConfig(**LAYERED, ffn_dim=64, word_embed_proj_dim=32) if kind == "opt" else _config(kind))
    with pytest.raises(ValueError, match=text):
        FineTune(partial(torch.optim.AdamW, **RATE), pretrained=str(tmp_path), **options).configure_model()
