"""The losses of transformers are those of the whole batch, for samples of different lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipepart.recording import record
from pipepart.samples import weigh

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDE = {**SMALL, "intermediate_size": 16, "max_position_embeddings": 32}


def _gpt2(**more: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **more
    )
    return transformers.GPT2LMHeadModel(config)


def _bert(kind: str, **more: Any) -> Any:
    config = transformers.BertConfig(
        **WIDE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3, **more
    )
    return getattr(transformers, kind)(config)


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, Any] = {
    "causal": _gpt2,
    "causal, tokens given": _gpt2,
    "masked": lambda: _bert("BertForMaskedLM"),
    "sequence": lambda: _bert("BertForSequenceClassification"),
    "regression": lambda: _bert("BertForSequenceClassification", problem_type="regression"),
    "several labels": lambda: _bert("BertForSequenceClassification", problem_type="multi_label_classification"),
    "tokens": lambda: _bert("BertForTokenClassification"),
    "choice": lambda: _bert("BertForMultipleChoice"),
    "encoder and decoder": _t5,
}


def _batch(name: str, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    length = 6
    shape = (size, 3, length) if name == "choice" else (size, length)
    ids = torch.randint(3, 40, shape, generator=generator)
    lengths = torch.tensor([length, 2, 2, 5, 1, 2, 2, 1, 1])[:size]
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    if name == "choice":
        return {"input_ids": ids, "labels": torch.randint(0, 3, (size,), generator=generator)}
    labels = ids.masked_fill(mask == 0, -100)
    if name == "sequence":
        labels = torch.randint(0, 3, (size,), generator=generator)
    elif name == "regression":
        labels = torch.randn(size, 3, generator=generator)
    elif name == "several labels":
        labels = torch.randint(0, 2, (size, 3), generator=generator).double()
    elif name == "tokens":
        labels = torch.where(mask == 1, ids % 3, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name == "causal, tokens given":
        batch["num_items_in_batch"] = torch.tensor(17)
    return batch


class WithLoss(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_transformers(name: str, double: None) -> None:
    sizes = (3, 2, 2, 2)
    model = WithLoss(MODELS[name]()).double().train()
    whole = _batch(name, sum(sizes))
    expected = model(**whole)
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    recording = record(model, (), _batch(name, 3))
    weighed = weigh(recording)
    root = weighed.recording.loss_index
    assert root is not None and not weighed.reasons
    leaves = recording.flatten((), whole)
    numbers = weighed.numbers(leaves, sizes)
    module = weighed.recording.graph_module()
    total = torch.zeros((), dtype=expected.dtype)
    start = 0
    for index, size in enumerate(sizes):
        part = [leaf[start : start + size] if leaf.dim() else leaf for leaf in leaves]
        start += size
        extra = [value[index] if isinstance(value, tuple) else value for value in numbers.inputs.values()]
        loss = module(*part, *extra)[root] * (1.0 if weighed.laws[root] == "sum" else size / sum(sizes))
        loss.backward()
        total = total + loss.detach()
    # transformers computes the losses of causal models in float32
    close = {"rtol": 1e-7, "atol": 1e-9} if expected.dtype == torch.float64 else {"rtol": 2e-6, "atol": 1e-8}
    torch.testing.assert_close(total, expected.detach(), **close)
    for key, parameter in model.named_parameters():
        if key in gradients:
            torch.testing.assert_close(parameter.grad, gradients[key], **close)
