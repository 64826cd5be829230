"""Cutting batches and putting results together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart import Pipeline
from pipepart.errors import PlanError
from pipepart.runtime.microbatch import batch_size_of, merge_outputs, microbatch_sizes, slice_leaves


@settings(derandomize=True, max_examples=200)
@given(st.integers(1, 200), st.integers(1, 50))
def test_sizes_cover_the_batch_and_differ_by_one_at_most(batch: int, count: int) -> None:
    if batch < count:
        with pytest.raises(PlanError, match="cannot be split"):
            microbatch_sizes(batch, count)
        return
    sizes = microbatch_sizes(batch, count)
    assert sum(sizes.sizes) == batch
    assert len(sizes) == count
    assert max(sizes.sizes) - min(sizes.sizes) <= 1
    assert sum(sizes.weights) == pytest.approx(1.0)


def test_leaves_without_the_batch_dimension_go_to_all() -> None:
    x, scale, name = torch.arange(10).view(5, 2), torch.tensor([1.0, 2.0]), "text"
    parts = slice_leaves([x, scale, name], microbatch_sizes(5, 2))
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert all(part[1] is scale and part[2] == "text" for part in parts)


def test_batch_size_is_that_of_the_first_tensor_with_a_dimension() -> None:
    assert batch_size_of([3, torch.tensor(1.0), torch.zeros(7, 2)]) == 7


def test_merged_outputs_are_those_of_one_batch() -> None:
    x = torch.randn(7, 3)
    sizes = microbatch_sizes(7, 3)
    outputs = [
        (part.pow(2).sum(1).mean(), part * 2, part.mean(0), "label", (part > 0).sum() * 0 + 4)
        for part in x.split(sizes.sizes)
    ]
    loss, doubled, mean, label, count = merge_outputs(outputs, sizes)
    torch.testing.assert_close(loss, x.pow(2).sum(1).mean())
    torch.testing.assert_close(doubled, x * 2)
    torch.testing.assert_close(mean, x.mean(0))
    assert label == "label"
    assert float(count) == 4.0


class _Single(torch.nn.Module):
    """Does something else for a single sample, as masks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * 2 if x.shape[0] != 1 else x).square().mean()


def test_a_last_batch_is_cut_so_that_the_recording_holds() -> None:
    from pipepart import Pipeline

    model = _Single()
    pipe = Pipeline(model, (torch.randn(16, 4),), stages=1, microbatches=4)
    for size in (5, 3):  # 2, 1, 1, 1 would need two recordings, and 1, 1, 1 another one
        batch = torch.randn(size, 4)
        model.zero_grad()
        loss = pipe.step(batch)
        torch.testing.assert_close(loss, model.layers(batch * 2).square().mean().detach())
        gradient = model.layers[0].weight.grad.clone()
        model.zero_grad()
        model.layers(batch * 2).square().mean().backward()
        torch.testing.assert_close(gradient, model.layers[0].weight.grad)


class Counted(torch.nn.Module):
    """Returns Python numbers beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4).double()

    def forward(self, x):
        h = self.linear(x)
        rows = x.shape[0]
        return {"loss": h.pow(2).mean(), "rows": rows, "twice": 2 * rows, "share": rows / 4 + 1, "width": x.shape[1]}


def test_returned_numbers_are_those_of_the_whole_batch() -> None:
    pipe = Pipeline(Counted(), (torch.rand(8, 4, dtype=torch.float64),), stages=1, microbatches=4)
    for size in (8, 6, 3):
        x = torch.rand(size, 4, dtype=torch.float64)
        expected = Counted()(x)
        for found in (pipe.step(x), pipe.evaluate(x)):
            assert {name: found[name] for name in expected if name != "loss"} == {
                name: value for name, value in expected.items() if name != "loss"
            }
            assert all(type(found[name]) is type(expected[name]) for name in expected)
