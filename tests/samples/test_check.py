"""The batch check: models in which samples meet are flagged with the op, others are not, and no model changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.mixers import MIXERS, PLAIN
from torch import nn

from pipepart.build.batch_verdict import look_at_samples
from pipepart.recording import record
from pipepart.samples.batch_check import check_batch

AT_FAULT = {
    "simclr": "matmul",
    "clip": "matmul",
    "barlow_twins": "sub",
    "vicreg": "var",
    "triplet_mining": "triplet_margin_loss",
    "batch_hard": "cdist",
    "supcon": "einsum",
    "hand_norm": "sub",
    "batch_attention": "scaled_dot_product_attention",
    "memory": "cat",
    "load_balancing": "mul",
    "ranking": "sub",
    "mmd": "sub",
    "rmse": "sqrt",
    "saturated": "square",
    "packed_tokens": "eq",
}


def _look(model: Any, total: int = 12, size: int = 6) -> Any:
    torch.manual_seed(1)
    batch = model.batch(total)
    recording = record(model, tuple(tensor[:size] for tensor in batch))
    return check_batch(recording, batch, size).mixing, look_at_samples(recording, batch, {}, size)


def _built(make: Any) -> Any:
    torch.manual_seed(0)
    return make().train()


@pytest.mark.parametrize("name", MIXERS)
def test_models_that_mix_samples_are_flagged_by_op_and_line(name: str) -> None:
    mixing, samples = _look(_built(MIXERS[name]))
    assert not mixing.same and 0 in mixing.wrong
    assert mixing.fault.target == AT_FAULT[name]
    assert mixing.fault.source.startswith("mixers.py:")
    assert str(mixing.fault) in samples.text


@pytest.mark.parametrize("name", PLAIN)
def test_models_that_do_not_are_not(name: str) -> None:
    model = _built(PLAIN[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    mixing, samples = _look(model)
    assert mixing.same and mixing.exact and samples.text == "" and samples.cut is None
    assert mixing.gradient.relative < 1e-7
    torch.manual_seed(7)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and all(m.training for m in model.modules())


def test_nothing_of_the_model_changes_while_it_is_checked() -> None:
    model = _built(MIXERS["memory"])
    batch = model.batch(8)
    recording = record(model, tuple(tensor[:4] for tensor in batch))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check_batch(recording, batch, 4)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_batch_norm_is_a_note() -> None:
    _, samples = _look(_built(PLAIN["batch_norm"]))
    assert samples.notes == ("BatchNorm normalises each micro-batch by its own statistics: norm, free",)
    _, samples = _look(_built(PLAIN["own_batch_norm"]))
    assert samples.notes == ("BatchNorm normalises each micro-batch by its own statistics: norm",)


def test_packed_tokens_are_refused_with_a_way_out() -> None:
    _, samples = _look(_built(MIXERS["packed_tokens"]), 40, 20)
    assert samples.cut is None
    assert "packed tokens" in samples.text and "microbatches=1" in samples.text and "gradients differ" in samples.text
    assert "batch_dim=1" in samples.text and "split(self, batch, n)" in samples.text


class Whole(nn.Module):
    """One input holds its samples along dimension 1, so that it is taken for a table that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        mixed = self.layer(torch.cat([x, y])).exp().sum(0) * turned.mean(1)
        return (self.layer(mixed).sum() ** 2).sqrt()

    def batch(self, total: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(total, 4), torch.randn(total, 4), torch.randn(4, total)


def test_tensors_with_samples_along_another_dimension_are_named_with_the_option() -> None:
    model = _built(Whole)
    batch = model.batch(12)
    recording = record(model, (batch[0][:6], batch[1][:6], batch[2]))
    samples = look_at_samples(recording, batch, {}, 6)
    assert any("turned (4, 12). If it holds samples" in note and "batch_dim=1" in note for note in samples.notes)


class Gate(nn.Module):
    """Samples meet behind a gate that is closed at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h + self.gate * h.mean(0)).pow(2).mean()

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(size, 8),)


def test_a_gate_that_is_closed_at_the_start_hides_nothing() -> None:
    mixing, samples = _look(_built(Gate))
    assert not mixing.same and "mixers" not in samples.text and "test_check.py" in samples.text


class Typed(Gate):
    """An op is given its type by keyword."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.softmax(self.first(x), -1, dtype=torch.float32)).pow(2).mean()


def test_types_that_are_given_by_keyword_are_float64_in_the_check() -> None:
    mixing, _ = _look(_built(Typed))
    assert mixing.same and mixing.exact


class BackwardMixes(nn.Module):
    """The forward looks at one sample at a time, the backward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        h.register_hook(lambda gradient: gradient / gradient.norm())
        return F.mse_loss(h, torch.zeros_like(h))

    @staticmethod
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(size, 8),)


def test_samples_that_meet_in_backward_only() -> None:
    mixing, samples = _look(_built(BackwardMixes))
    assert mixing.wrong == () and not mixing.same_gradients
    assert "in backward only" in samples.text and "microbatches=1" in samples.text


def test_a_model_on_the_meta_device_is_not_run() -> None:
    with torch.device("meta"):
        model = MIXERS["clip"]()
    batch = model.batch(8)
    recording = record(model, tuple(tensor[:4] for tensor in batch))
    samples = look_at_samples(recording, batch, {}, 4)
    assert samples.cut is None and "meta device" in samples.text


def test_leaves_that_disagree_about_the_batch_are_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
            z = self.net(x)
            return torch.logsumexp(z @ z.T, 1).mean() + (z @ queue.T).mean()

    model = Two()
    recording = record(model, (torch.randn(4, 8), torch.randn(5, 8)))
    samples = look_at_samples(recording, (torch.randn(8, 8), torch.randn(5, 8)), {}, 4)
    assert samples.cut is not None and "queue (5, 8)" in samples.notes[0]


class Hits(nn.Module):
    """A loss of single samples, and a count of hits among all samples of the batch."""

    def __init__(self, count: str) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(5, 5), count

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.layer(x).tanh()
        loss = (h - y).square().mean()
        if self.count == "retrieval":
            return loss, ((h @ y.T).argmax(1) == torch.arange(len(x))).sum()
        if self.count == "accuracy":
            return loss, ((h @ y.T).argmax(1) == torch.arange(len(x))).double().mean()
        if self.count == "above":
            return loss, (h[:, 0] > h[:, 0].mean()).sum()
        if self.count == "labels":
            return loss, (y[:, 0] > y[:, 0].mean()).sum()
        if self.count == "plain":
            return loss, (h.argmax(1) == y.argmax(1)).sum()
        return loss, (h[h[:, 0].argsort()].sum(1) > 0).sum()


@pytest.mark.parametrize("count", ["retrieval", "accuracy", "above"])
def test_counts_that_agree_by_chance_are_flagged(count: str) -> None:
    """For these seeds, the count of the first comparison agrees with that of the parts, for every kind of count."""
    for seed in (21, 32, 33, 35):
        torch.manual_seed(seed)
        model, batch = Hits(count), (torch.randn(8, 5), torch.randn(8, 5))
        recording = record(model, tuple(tensor[:4] for tensor in batch))
        samples = look_at_samples(recording, batch, {}, 4)
        assert samples.text or samples.cut is not None, seed


@pytest.mark.parametrize("count", ["plain", "sorted", "labels"])
def test_counts_of_single_samples_are_not(count: str) -> None:
    """Counts that compare samples with a number of the batch alone are not flagged either: the first stage knows it."""
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        model, batch = Hits(count), (torch.randn(8, 5), torch.randn(8, 5))
        recording = record(model, tuple(tensor[:4] for tensor in batch))
        samples = look_at_samples(recording, batch, {}, 4)
        assert not samples.text and samples.cut is None, seed
