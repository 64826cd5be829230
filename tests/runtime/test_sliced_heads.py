"""Heads in slices give the loss and the gradients of whole heads, and never make the scores of all tokens."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.heads import FORMS, Model, batch
from torch.utils._python_dispatch import TorchDispatchMode

from pipepart.machine import usable
from pipepart.recording import record, split
from pipepart.runtime.deferred import deferring
from pipepart.runtime.head_slices import with_sliced_heads
from pipepart.runtime.sliced_loss import sliced_cross_entropy

ROWS, CLASSES, WIDTH = 23, 40, 8


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return result


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextmanager
def kept_tensors() -> Iterator[Callable[[], dict[int, int]]]:
    """A function that returns the storages that autograd keeps at this moment, with their bytes."""
    found: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        found.add(kept)
        return kept

    def now() -> dict[int, int]:
        storages = [kept.tensor.untyped_storage() for kept in found]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        yield now


def parts(layout: str, **more: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    shapes = {"rows": (ROWS, WIDTH), "classes second": (ROWS, WIDTH, 2), "one": (WIDTH,)}
    hidden, weight, bias = random(*shapes[layout]), random(CLASSES, WIDTH), random(CLASSES)
    targets = {"rows": (ROWS,), "classes second": (ROWS, 2), "one": ()}[layout]
    target = torch.randint(0, CLASSES, targets, generator=generator)
    if target.dim():
        target.view(-1)[::3] = -100
    return hidden, weight, bias, target


def whole(hidden: Any, weight: Any, bias: Any, target: Any, class_weight: Any, settings: dict[str, Any]) -> Any:
    at = min(1, hidden.dim() - 1)
    scores = F.linear(hidden.movedim(at, -1), weight, bias).movedim(-1, at)
    return F.cross_entropy(scores, target, class_weight, **settings)


@pytest.mark.parametrize("layout", ["rows", "classes second", "one"])
def test_loss_and_gradients_equal_those_of_the_whole(layout: str) -> None:
    hidden, weight, bias, target = parts(layout)
    class_weight = torch.rand(CLASSES, dtype=torch.float64)
    cases = itertools.product(("mean", "sum"), (0.0, 0.1), (None, class_weight), (None, bias), (5, 64))
    for reduction, smoothing, classes, added, tokens in cases:
        settings = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -100}
        inputs = [hidden, weight] + ([added] if added is not None else [])
        expected = whole(hidden, weight, added, target, classes, settings)
        found = sliced_cross_entropy(hidden, weight, added, target, classes, tokens=tokens, **settings)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        pairs = zip(torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * expected, inputs))
        for gradient, wanted in pairs:
            torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            again = sliced_cross_entropy(hidden, weight, added, target, classes, tokens=tokens, **settings)
        torch.testing.assert_close(again, expected)


def test_all_targets_ignored() -> None:
    hidden, weight, bias, target = parts("rows")
    target.fill_(-100)
    loss = sliced_cross_entropy(hidden, weight, bias, target, tokens=4)
    assert loss.isnan(), "as the mean of no losses is in torch"
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, [hidden, weight, bias]))


def test_two_halves_of_backward() -> None:
    hidden, weight, bias, target = parts("rows")
    weight, bias = (torch.nn.Parameter(value.detach()) for value in (weight, bias))
    expected = torch.autograd.grad(whole(hidden, weight, bias, target, None, {}), [hidden, weight, bias])
    loss = sliced_cross_entropy(hidden, weight, bias, target, tokens=4)
    with deferring() as work:
        loss.backward()
    assert (len(work), weight.grad, bias.grad) == (1, None, None)
    torch.testing.assert_close(hidden.grad, expected[0])
    work[0]()
    torch.testing.assert_close(weight.grad, expected[1])
    torch.testing.assert_close(bias.grad, expected[2])


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)], ids=str)
def test_frozen_parts(trained: tuple[bool, bool]) -> None:
    hidden, weight, _, target = parts("rows")
    hidden, weight = (value.detach().requires_grad_(on) for value, on in zip((hidden, weight), trained))
    with kept_tensors() as kept:
        loss = sliced_cross_entropy(hidden, weight, None, target, tokens=4)
    assert loss.requires_grad == any(trained)
    if any(trained):
        expected = whole(hidden, weight, None, target, None, {})
        inputs = [value for value in (hidden, weight) if value.requires_grad]
        for found, wanted in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs)):
            torch.testing.assert_close(found, wanted)
    assert sum(kept().values()) <= weight.nbytes + 2 * hidden.nbytes + 2 * target.nbytes


def test_the_scores_of_all_tokens_are_never_made() -> None:
    hidden, weight, bias, target = parts("rows")
    with kept_tensors() as kept, Largest() as largest:
        loss = sliced_cross_entropy(hidden, weight, bias, target, tokens=4)
    parameters = (weight.data_ptr(), bias.data_ptr())
    activations = {pointer: size for pointer, size in kept().items() if pointer not in parameters}
    assert sum(activations.values()) <= 2 * hidden.nbytes + target.nbytes + 64, "hidden states, their gradient, targets"
    with largest:
        loss.backward()
    assert largest.elements <= max(weight.numel(), 4 * CLASSES) < ROWS * CLASSES


@pytest.mark.skipif(not usable("bfloat16"), reason="this processor has no products of this dtype")
def test_autocast_is_that_of_the_model() -> None:
    hidden, weight, bias, target = (
        value.detach().float() if value.is_floating_point() else value for value in parts("rows")
    )
    inputs = [value.requires_grad_() for value in (hidden, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight, bias).float(), target)
    with torch.autocast("cpu", torch.bfloat16):
        found = sliced_cross_entropy(hidden, weight, bias, target, tokens=8, casts=(torch.float32,))
        used = F.linear(hidden.detach(), weight)  # autocast has kept no copy of the weight without a gradient
    assert used.requires_grad
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.0)
    for gradient, wanted in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)):
        assert gradient.dtype == wanted.dtype == torch.float32
        torch.testing.assert_close(gradient, wanted, rtol=0.03, atol=2e-3)


@pytest.mark.parametrize("name", FORMS)
def test_a_recorded_step_with_a_head_in_slices(name: str) -> None:
    """Also at another batch size than that of the example, as one chunk and as two."""
    model = Model(FORMS[name])
    recording = record(model, batch())
    names = [node.name for node in recording.ops]
    border = next(i for i, node in enumerate(recording.ops) if "tanh" in node.name)
    for count in (1, 2):
        owner = {node: int(count > 1 and i > border) for i, node in enumerate(names)}
        sliced = with_sliced_heads(recording, owner, 3)
        assert any(node.target is sliced_cross_entropy for node in sliced.graph.nodes)
        assert {node.name for node in sliced.ops} <= set(names)
        chunks = split(sliced, owner, count)
        assert [p for chunk in chunks for p in chunk.parameters] != []
        for size in (3, 5):
            model.zero_grad()
            model(*batch(size)).backward()
            expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            values = dict(zip((spec.name for spec in sliced.inputs), recording.flatten(batch(size))))
            for chunk in chunks:
                results = chunk.module(*(values[edge.name] for edge in chunk.imports))
                values.update(zip((edge.name for edge in chunk.exports), results))
            loss = results[recording.loss_index or 0]
            torch.testing.assert_close(loss, model(*batch(size)))
            loss.backward()
            assert {key for key, p in model.named_parameters() if p.grad is not None} == set(expected)
            for key, gradient in expected.items():
                torch.testing.assert_close(dict(model.named_parameters())[key].grad, gradient, rtol=1e-9, atol=1e-12)


def test_a_head_in_two_chunks_stays_whole() -> None:
    recording = record(Model(FORMS["flat"]), batch())
    ops = recording.ops
    loss = next(i for i, node in enumerate(ops) if "cross_entropy" in node.name)
    owner = {node.name: int(i >= loss) for i, node in enumerate(ops)}
    assert with_sliced_heads(recording, owner, 3) is recording
    assert with_sliced_heads(recording, dict.fromkeys(owner, 0), 0) is recording
