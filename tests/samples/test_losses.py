"""Every form of loss: the sum over micro-batches with the weights of the batch is the loss of one process, gradients too."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from pipepart.recording import GuardError, Recording, record
from pipepart.samples.weigh import Weighed, weigh
from tools.bench.losses.forms import FORMS, Model, batch

SIZES = (3, 3, 2, 1)
"""The last micro-batch has no target at all."""


@cache
def _recorded(name: str) -> tuple[Model, Recording]:
    """The model of a form, and its recording, which `weigh` copies."""
    torch.manual_seed(0)
    model = Model(FORMS[name])
    return model, record(model, batch(3, seed=1))


def _gradients(model: Model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _run(weighed: Weighed, leaves: list[Any], sizes: tuple[int, ...], numbers: Any) -> list[Any]:
    """All micro-batches forward and backward, with the outputs merged by their laws."""
    module = weighed.recording.graph_module()
    outputs = []
    parts = zip(*(leaf.split(sizes) for leaf in leaves))
    for index, (part, size) in enumerate(zip(parts, sizes)):
        extra = [v[index] if isinstance(v, tuple) else v for v in numbers.inputs.values()]
        values = module(*(leaf.clone() for leaf in part), *extra)
        root = weighed.recording.loss_index
        assert root is not None
        (values[root] * (1.0 if weighed.laws[root] == "sum" else size / sum(sizes))).backward()
        outputs.append([value.detach() for value in values])
    merged = []
    for law, values in zip(weighed.laws, zip(*outputs)):
        assert law in ("sum", "mean", "constant"), weighed.reasons
        shares = [1.0 if law == "sum" else size / sum(sizes) for size in sizes]
        merged.append(sum(values) if law == "sum" else sum(v * share for v, share in zip(values, shares)))
    return merged


@pytest.mark.parametrize("name", FORMS)
def test_losses_of_the_whole_batch(name: str, double: None) -> None:
    model, recording = _recorded(name)
    model.zero_grad()
    whole = batch(sum(SIZES))
    expected = model(*(leaf.clone() for leaf in whole))
    leaves = pytree.tree_leaves(expected)
    (expected["loss"] if isinstance(expected, dict) else expected).backward()
    gradients = _gradients(model)
    model.zero_grad()
    weighed = weigh(recording)
    assert not weighed.reasons
    got = _run(weighed, list(whole), SIZES, weighed.numbers(whole, SIZES))
    for value, reference in zip(got, leaves):
        torch.testing.assert_close(value, reference.detach(), rtol=1e-9, atol=1e-11, check_dtype=True)
    assert _gradients(model).keys() == gradients.keys()
    for key, gradient in _gradients(model).items():
        torch.testing.assert_close(gradient, gradients[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (lambda m, o, y, k, s: F.mse_loss(o, s).sqrt(), "sqrt"),
        (lambda m, o, y, k, s: o.mean() * s.mean() * o.std(), "std"),
        (lambda m, o, y, k, s: o[o > 0].mean(), "made from the batch alone"),
        (lambda m, o, y, k, s: (o * s).sum() / o.detach().abs().sum(), "depend on the parameters"),
        (lambda m, o, y, k, s: o[torch.rand(o.shape) > 0.5].mean(), "made from the batch alone"),
        (lambda m, o, y, k, s: F.cross_entropy(o.mean(1) @ o.mean(1).T, torch.arange(len(o))), "samples"),
        (lambda m, o, y, k, s: (o.mean(1) @ o.mean(1).T).mean(), "once"),
        (lambda m, o, y, k, s: F.mse_loss(o.mean((1, 2))[:, None], s.mean((1, 2))), "different dimensions"),
        (lambda m, o, y, k, s: o.half().flatten(0, 1)[k.flatten()].mean(), "float16"),
    ],
)
def test_what_is_no_sum_is_unknown(form: Any, why: str) -> None:
    """The walk does not guess: the batch check covers these losses."""
    recording = record(Model(form), batch(4, seed=1))
    weighed = weigh(recording)
    assert weighed.laws == ("unknown",) and why in weighed.reasons[0]
    assert not weighed.numbers.inputs and not weighed.numbers.quantities


def test_a_mean_costs_nothing() -> None:
    """A mean over samples stays as it is: no input is added, nothing is computed before the step."""
    recording = record(Model(FORMS["mse"]), batch(4, seed=1))
    weighed = weigh(recording)
    assert weighed.laws == ("mean",) and not weighed.numbers.inputs and not weighed.numbers.quantities
    assert [node.target for node in weighed.recording.graph.nodes] == [node.target for node in recording.graph.nodes]


def test_decisions_are_those_of_the_whole_batch(double: None) -> None:
    """`max(mask.sum(), 1)` was decided by a batch with tokens: one without any is another decision."""
    recording = record(Model(FORMS["by hand max"]), batch(4, seed=1))
    weighed = weigh(recording)
    x, y, mask, soft = batch(4)
    with pytest.raises(GuardError, match=r"forms\.py"):
        weighed.numbers((x, y, torch.zeros_like(mask), soft), (2, 2))


def test_the_loss_is_computed_once() -> None:
    """Another op that uses the loss of a micro-batch (a perplexity) gets it from the same op."""

    def form(m: Any, o: Any, y: Any, k: Any, s: Any) -> Any:
        loss = F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1)
        return {"loss": loss, "perplexity": loss.detach().exp()}

    weighed = weigh(record(Model(form), batch(4, seed=1)))
    calls = [node for node in weighed.recording.graph.nodes if node.target is F.cross_entropy]
    assert weighed.laws == ("sum", "unknown") and len(calls) == 1


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("logs", "inputs / largest")])
def test_gradients_over_replicas(name: str, double: None) -> None:
    """The mean over two replicas with uneven batches is the gradient of one process on both batches."""
    model, recording = _recorded(name)
    model.zero_grad()
    batches = [batch(9), batch(6, seed=1)]
    model(*(torch.cat(parts) for parts in zip(*batches))).backward()
    expected = _gradients(model)
    model.zero_grad()
    weighed = weigh(recording, replicas=2)
    sizes = [(3, 3, 2, 1), (2, 2, 1, 1)]
    counts: list[list[float]] = []
    for leaves, cut in zip(batches, sizes):
        weighed.numbers(leaves, cut, lambda values: counts.append(list(values)) or list(values))
    for leaves, cut in zip(batches, sizes):
        numbers = weighed.numbers(leaves, cut, lambda values: [sum(pair) for pair in zip(*counts)])
        _run(weighed, list(leaves), cut, numbers)
    for key, gradient in _gradients(model).items():
        torch.testing.assert_close(gradient / 2, expected[key], rtol=1e-9, atol=1e-11)
